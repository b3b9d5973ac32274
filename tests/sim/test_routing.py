"""Routers, the directory and decisions through `kvtrie sim run`."""

import json
import re

import pytest

from kvtrie import BlockManager, ModelShape, Tier
from kvtrie._kvtrie import Simulation
from kvtrie.cli import main
from kvtrie.errors import ConfigError
from kvtrie.sim.config import read_config
from kvtrie.sim.run import run_config

A = list(range(64))
B = list(range(100, 164))
MS = 10**6
SETTINGS = """
machines = 2
trace = {path="t.jsonl", format="tokens"}
model = {layers=4, kv_heads=1, head_dim=64, dtype="float16"}
manager = {block_tokens=16, policy="lru"}
cost = {kind="affine", ns_per_token=1000, alpha=0.0}
tiers = [
  {kind="gpu", blocks=4, write="through"},
  {kind="host", blocks=64, read={bytes_per_s=16384000}, store={bytes_per_s=16384000}},
]
"""
PROMPTS = [(0, A), (0, B), (9, A), (9, B), (9, B), (9, B), (9, B), (9, B)]


@pytest.fixture
def config(tmp_path):
    rows = [{"arrival_ns": at * MS, "tokens": t, "output_tokens": 1} for at, t in PROMPTS]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = tmp_path / "sim.toml"
    path.write_text(SETTINGS)
    return path


def sent(config, *changes, best=0):
    """The decisions of a run."""
    lines = []
    run_config(read_config(config, changes), on_decision=lines.append, best=best)
    return lines


@pytest.mark.parametrize(
    ("change", "machines"),
    [
        ("router.kind=round-robin", [0, 1, 0, 1, 0, 1, 0, 1]),
        ("router.kind=locality", [0, 1, 0, 1, 1, 1, 1, 0]),
        ('router={kind="locality", ratio=1}', [0, 1, 0, 1, 1, 0, 1, 0]),
        ('router={kind="locality", ratio=2.5}', [0, 1, 0, 1, 1, 1, 1, 1]),
        ("router.kind=score", [0, 1, 0, 1, 1, 0, 1, 0]),
        ('router={kind="score", load_weight=0}', [0, 1, 0, 1, 1, 1, 1, 1]),
        ('router={kind="score", hit_weight=9}', [0, 1, 0, 1, 1, 1, 1, 1]),
    ],
)
@pytest.mark.parametrize("directory", ['{kind="exact"}', '{kind="events", delay_ns=1000}'])
def test_a_router_sends_by_hits_and_load(config, change, machines, directory):
    lines = sent(config, change, f"directory={directory}")
    assert [line["machine"] for line in lines] == machines
    assert [line["id"] for line in lines] == list(range(8))


def test_a_late_directory_costs_regret(config):
    def regrets(delay_ns):
        directory = f'directory={{kind="events", delay_ns={delay_ns}}}'
        return sum(line["regret_ns"] for line in sent(config, "router.kind=locality", directory))

    assert regrets(0) == 0 < regrets(9 * MS)


def test_decisions_are_written_beside_requests(config, capsys):
    files = {name: config.with_name(f"{name}.jsonl") for name in ("requests", "decisions")}
    options = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    choice = ["--set", "router.kind=score", "--best", "1"]
    assert main(["sim", "run", str(config), "--json", *options, *choice]) == 0
    capsys.readouterr()
    rows = {
        name: list(map(json.loads, path.read_text().splitlines())) for name, path in files.items()
    }
    machines = [[row["machine"] for row in rows[name]] for name in files]
    assert machines[0] == machines[1]
    assert rows["decisions"][4] == {
        "id": 4,
        "arrival_ns": 9 * MS,
        "machine": 1,
        "hit_tokens": 48,
        "queued_tokens": 64,
        "cost_ns": 32_000,
        "best": [{"machine": 0, "hit_tokens": 0, "queued_tokens": 64, "cost_ns": 80_000}],
        "regret_ns": 0,
    }
    assert sent(config, "router.kind=score", best=1) == rows["decisions"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ('router={kind="locality", ratio=0.5}', "router.ratio is 0.5"),
        ('router={kind="locality", hit_weight=1}', "router.hit_weight is 1, but there is no such"),
        ('router={kind="score", hit_weight=-1}', "router.hit_weight is -1"),
        ('router={kind="score", load_weight=1.5}', "router.load_weight is 1.5"),
        ('router={kind="hash", ratio=2}', "router.ratio is 2, but there is no such key: kind"),
        ("router.kind=nearest", "router.kind is one of round-robin, .*, not 'nearest'"),
        ("directory.kind=gossip", "directory.kind is one of exact, events, not 'gossip'"),
        ("directory.delay_ns=5", "directory.delay_ns is 5, but there is no such key: kind"),
        ('directory={kind="events", delay_ns=-1}', "directory.delay_ns is -1"),
        ("directory=events", "directory is 'events', a table wanted"),
    ],
)
def test_what_cannot_be_is_refused_with_key_and_value(config, change, message, capsys):
    with pytest.raises(ConfigError, match=message):
        read_config(config, [change])
    assert main(["sim", "run", str(config), "--set", change]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_best_wants_a_file(config, capsys):
    assert main(["sim", "run", str(config), "--best", "3"]) == 2
    assert "--best is 3, but --decisions names no file" in capsys.readouterr().err


def test_a_router_that_cannot_be_is_refused():
    model, tiers = ModelShape(4, 1, 64, "float16"), [Tier("gpu", blocks=4, owner="none")]
    for router, message in [
        ("locality", "not 'locality'"),
        (("locality", 2), "ratio is 2, at least 2\\*\\*32"),
        (("score", 1), "not \\('score', 1\\)"),
        ((), "router is"),
    ]:
        with pytest.raises(ConfigError, match=message):
            Simulation(model, tiers, price=(1, 0), router=router)
    assert BlockManager(model, tiers).take_events() == []
