"""`kvtrie sim calibrate`: the model of the times is recovered, and checked on requests left out."""

import json
import random
import tomllib

import pytest

from kvtrie.cli import main
from kvtrie.sim.config import read_config
from kvtrie.sim.run import run_config

SETTINGS = """
trace = {path="t.jsonl"}
model = {layers=4, kv_heads=1, head_dim=64, dtype="float16"}
cost = {kind="affine", ns_per_token=1000, alpha=0.001}
tiers = [
  {kind="gpu", blocks=16, write="through", store={bytes_per_s=1e9}},
  {kind="host", blocks=64, read={bytes_per_s=1e8, latency_ns=100000}, store={bytes_per_s=1e9}},
]
"""
TRUE = (
    "cost.ns_per_token=3100",
    "cost.alpha=0.004",
    "tiers.1.read={bytes_per_s=5e7, latency_ns=3e5}",
)
FITTED = {
    "cost.ns_per_token": 3100,
    "cost.alpha": 0.004,
    "tiers.1.read.bytes_per_s": 5e7,
    "tiers.1.read.latency_ns": 3e5,
}


@pytest.fixture
def config(tmp_path):
    dice = random.Random(3)
    starts = [100 * dice.randrange(12) for _ in range(80)]
    rows = (
        {
            "arrival_ns": at * 10**7,
            "tokens": list(range(first, first + 16 * dice.randint(1, 6))),
            "output_tokens": dice.randint(1, 9),
        }
        for at, first in enumerate(starts)
    )
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = tmp_path / "sim.toml"
    path.write_text(SETTINGS)
    return path


def seen(config, noise=0.0):
    """The times of a run with the true settings."""
    dice, lines = random.Random(5), []
    run_config(read_config(config, TRUE), lines.append)
    for line in lines:
        for name in ("first_token_ns", "end_ns"):
            took = line[name] - line["arrival_ns"]
            line[name] = line["arrival_ns"] + round(took * (1 + dice.uniform(0, noise)))
        line["end_ns"] = max(line["end_ns"], line["first_token_ns"])
    path = config.with_name("seen.jsonl")
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_what_made_the_times_is_found_again(config, capsys, tmp_path):
    fragment = tmp_path / "fitted.toml"
    words = ["sim", "calibrate", str(config), "--seen", str(seen(config)), "--write", str(fragment)]
    assert main([*words, "--json"]) == 0
    fit = json.loads(capsys.readouterr().out)
    for key, value in FITTED.items():
        assert fit["values"][key] == pytest.approx(value, rel=0.01)
    assert (fit["fitted"], fit["left_out"]) == (40, 40)
    assert fit["before"]["ttft"] > 30
    assert fit["after"]["ttft"] < 0.1
    assert fit["after"]["e2e"] < 0.1
    tables = tomllib.loads(fragment.read_text())
    assert tables["cost"]["ns_per_token"] == fit["values"]["cost.ns_per_token"]
    settings = [line for line in SETTINGS.splitlines() if line.startswith(("trace", "model"))]
    config.write_text("\n".join([*settings, fragment.read_text()]))
    host = read_config(config).tiers[1]
    assert (host.blocks, host.read.latency_ns) == (64, fit["values"]["tiers.1.read.latency_ns"])
    assert main(words) == 0
    assert "over 40 requests; 40 others were fitted" in capsys.readouterr().out


def test_noise_is_left_in_the_error(config, capsys):
    words = ["--seen", str(seen(config, noise=0.2)), "--fit", "cost.ns_per_token"]
    assert main(["sim", "calibrate", str(config), *words, "--json"]) == 0
    fit = json.loads(capsys.readouterr().out)
    assert list(fit["values"]) == ["cost.ns_per_token"]
    assert 3 < fit["after"]["ttft"] < fit["before"]["ttft"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--fit", "cost.nothing"], "--fit cost.nothing: the settings do not have nothing"),
        (["--fit", "model.dtype"], "model.dtype is 'float16', finite"),
        (["--fit", "trace.hash_tokens", "--set", "trace.hash_tokens=0"], "hash_tokens is 0"),
        (["--fit", "cost.alpha", "--set", "cost.alpha=0"], "cost.alpha is 0: only positive"),
        (["--fit", "tiers.4.blocks"], "4 is no place in a list of 2"),
        (["--seen", "missing.jsonl"], "missing.jsonl"),
    ],
)
def test_what_cannot_be_fitted_is_refused(config, capsys, words, message):
    given = ["sim", "calibrate", str(config), "--seen", str(seen(config)), *words]
    assert main(given) == 2
    assert message in capsys.readouterr().err


def test_bad_lines_and_numbers_of_requests_are_refused(config, capsys):
    path = seen(config)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]))
    given = ["sim", "calibrate", str(config), "--seen", str(path)]
    assert main(given) == 2
    assert "79 requests were seen, but the trace has 80" in capsys.readouterr().err
    path.write_text('{"arrival_ns": 5, "first_token_ns": 4, "end_ns": 9}\n')
    assert main(given) == 2
    assert "line 1: first_token_ns is 4, 5 to" in capsys.readouterr().err


def test_runs_are_counted_for_who_waits(config, ticks):
    counts = ticks("kvtrie.cli.sim.calibrate.counting")
    words = ["--seen", str(seen(config)), "--fit", "cost.ns_per_token"]
    assert main(["sim", "calibrate", str(config), *words]) == 0
    assert counts["Simulating, runs:"] > 3
