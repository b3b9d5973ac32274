"""`kvtrie sim size`: the cheapest rooms for a goal, compared with all rooms."""

import json
import random

import pytest

from kvtrie.cli import main
from kvtrie.sim.config import read_config
from kvtrie.sim.run import run_config

SETTINGS = """
trace = {path="t.jsonl"}
model = {layers=4, kv_heads=1, head_dim=64, dtype="float16"}
cost = {kind="affine", ns_per_token=100000}
price = {gpu_hour=1.0, gib_hour={gpu=80.0, host=8.0}}
tiers = [
  {kind="gpu", blocks=8, write="through"},
  {kind="host", blocks=64, read={bytes_per_s=1e9}, store={bytes_per_s=1e9}},
]
"""


@pytest.fixture
def config(tmp_path):
    dice = random.Random(7)
    prompts = (100 * min(int(dice.expovariate(0.25)), 20) for _ in range(200))
    rows = (
        {"arrival_ns": at * 10**7, "tokens": list(range(first, first + 64))}
        for at, first in enumerate(prompts)
    )
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = tmp_path / "sim.toml"
    path.write_text(SETTINGS)
    return path


def mean(config, *changes):
    return run_config(read_config(config, changes))["ttft_ns"]["mean"]


def test_one_room_is_the_least_that_meets_the_goal(config, capsys):
    goal = 2_500_000
    words = ["--goal", f"ttft_mean_ns={goal}", "--over", "tiers.1.blocks=1:200", "--within", "0"]
    assert main(["sim", "size", str(config), "--json", *words]) == 0
    found = json.loads(capsys.readouterr().out)
    least = next(
        blocks for blocks in range(1, 201) if mean(config, f"tiers.1.blocks={blocks}") <= goal
    )
    assert 1 < least < 100
    assert found["found"]["values"] == {"tiers.1.blocks": least}
    assert found["found"]["below"] == {"tiers.1.blocks": least - 1}
    assert found["found"]["figures"]["ttft_ns"]["mean"] <= goal
    assert found["runs"] < 30
    assert main(["sim", "size", str(config), *words]) == 0
    text = capsys.readouterr().out
    assert f"tiers.1.blocks = {least}  ({least - 1} misses the goals)" in text


def test_several_rooms_are_traded_by_price(config, capsys):
    goal = 2_500_000
    words = ["--goal", f"ttft_mean_ns={goal}", "--within", "0", "--points", "20"]
    over = ["--over", "tiers.0.blocks=5:24", "--over", "tiers.1.blocks=1:100"]
    assert main(["sim", "size", str(config), "--json", *words, *over]) == 0
    found = json.loads(capsys.readouterr().out)["found"]
    gib = 2**14 / 2**30
    costs = {
        (gpu, host): 1 + 80 * gpu * gib + 8 * host * gib
        for gpu in range(5, 25)
        for host in range(1, 101)
    }
    # All rooms of the grid, cheapest first, until one meets the goal.
    for gpu, host in sorted(costs, key=costs.__getitem__):
        if mean(config, f"tiers.0.blocks={gpu}", f"tiers.1.blocks={host}") <= goal:
            break
    assert found["cost"] == pytest.approx(costs[gpu, host])
    assert tuple(found["values"].values()) == (gpu, host)


def test_a_goal_that_no_room_meets_is_reported(config, capsys, tmp_path):
    results = tmp_path / "results.jsonl"
    words = ["--goal", "ttft_p99_ns=1", "--over", "tiers.1.blocks=1:9", "--results", str(results)]
    assert main(["sim", "size", str(config), *words]) == 1
    assert "the largest rooms miss the goals (1 runs)" in capsys.readouterr().out
    assert len(results.read_text().splitlines()) == 1


def test_refused_requests_miss_every_goal(config, capsys):
    words = ["--goal", "e2e_p50_ns=1e12", "--over", "tiers.0.blocks=1:9", "--within", "0"]
    assert main(["sim", "size", str(config), "--json", *words]) == 0
    found = json.loads(capsys.readouterr().out)["found"]
    assert found["values"] == {"tiers.0.blocks": 4}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--goal", "ttft_p98_ns=1", "--over", "tiers.1.blocks=1:9"], "--goal is one of ttft_mean"),
        (["--goal", "ttft_p99_ns=x", "--over", "tiers.1.blocks=1:9"], "ttft_p99_ns is 'x'"),
        (["--goal", "ttft_p99_ns=1", "--over", "tiers.1.blocks=9"], "KEY=LOW:HIGH"),
        (["--goal", "ttft_p99_ns=1", "--over", "tiers.1.blocks=9:8"], "high end of tiers.1.blocks"),
        (["--goal", "ttft_p99_ns=1", "--over", "tiers.1.blcks=1:8"], "tiers.1.blcks is 1"),
        (["--goal", "ttft_p99_ns=1", "--over", "tiers.1.blocks=0:8"], "low end of tiers.1.blocks"),
    ],
)
def test_bad_ranges_and_goals_are_refused(config, capsys, words, message):
    assert main(["sim", "size", str(config), *words]) == 2
    assert message in capsys.readouterr().err


def test_runs_are_counted_for_who_waits(config, capsys, ticks):
    counts = ticks("kvtrie.cli.sim.size.counting")
    words = ["--goal", "ttft_mean_ns=2500000", "--over", "tiers.1.blocks=1:200", "--json"]
    assert main(["sim", "size", str(config), *words]) == 0
    assert counts == {"Simulating, runs:": json.loads(capsys.readouterr().out)["runs"]}
