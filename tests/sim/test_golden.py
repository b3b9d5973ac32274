"""Runs whose every byte is on file, here through Python; `rust/sim/tests/golden.rs` says how."""

from pathlib import Path

import pytest

from kvtrie.sim.config import config_of
from kvtrie.sim.run import open_simulation

FOLDER = Path(__file__).parents[2] / "rust/sim/tests/golden"
LANE = {"bytes_per_s": 16_384_000}
SETTINGS = {
    "trace": {"path": str(FOLDER / "trace.txt")},
    "model": {"layers": 4, "kv_heads": 1, "head_dim": 64, "dtype": "float16"},
    "manager": {"block_tokens": 16, "policy": "lru"},
    "cost": {"kind": "affine", "ns_per_token": 1000, "alpha": 0.001},
    "tiers": [
        {"kind": "gpu", "blocks": 10, "write": "back"},
        {"kind": "host", "blocks": 30, "read": LANE, "store": LANE},
    ],
}
RUNS = {
    "serial": {
        "machines": 2,
        "engine": {"kind": "serial", "wait": "layer"},
        "peers": {"lookup": "all", "bytes_per_s": 8_192_000, "latency_ns": 5},
    },
    "continuous": {"engine": {"kind": "continuous", "token_budget": 64, "max_running": 8}},
    "disaggregated": {
        "machines": 3,
        "engine": {"kind": "disaggregated", "prefill": 1, "token_budget": 64, "max_running": 8},
        "peers": {"bytes_per_s": 8_192_000, "latency_ns": 5, "shares": "net"},
    },
}


def request_row(line):
    """A request from its line."""
    arrival, output, *ranges = line.split(" ")
    ends = (map(int, one.split("+")) for one in ranges)
    tokens = [token for first, count in ends for token in range(first, first + count)]
    return int(arrival), tokens, len(tokens), int(output), None


def record_line(record):
    """The line of a record."""
    number, machine, arrival, first, end, hits, peer, (computed, *_), *_ = record
    times = ("-" if at is None else at for at in (first, end))
    return " ".join(map(str, (number, machine, arrival, *times, *hits, peer, computed)))


def words(call):
    """A call as words: its name, then all numbers in it."""
    for value in call:
        if isinstance(value, list | tuple):
            yield from words(value)
        # A session is none here, and the tier of a suspension is no number.
        elif value is not None and value not in {"gpu", "host"}:
            yield str(int(value) if isinstance(value, bool) else value)


def digest(simulation, machines):
    """64-bit FNV-1a of all calls of all machines, a line each."""
    value = 0xCBF29CE484222325
    for machine in range(machines):
        for call in simulation.log(machine):
            for byte in (" ".join(words(call)) + "\n").encode():
                value = (value ^ byte) * 0x100000001B3 % 2**64
    return value


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_the_one_on_file(name):
    config = config_of({**SETTINGS, **RUNS[name]}, FOLDER)
    simulation = open_simulation(config, logged=True)
    lines = (FOLDER / "trace.txt").read_text().splitlines()
    rows = []
    simulation.run(map(request_row, lines), rows.append)
    seen = [
        *map(record_line, rows),
        f"calls {digest(simulation, RUNS[name].get('machines', 1)):016x}",
    ]
    assert seen == (FOLDER / f"{name}.txt").read_text().splitlines()
