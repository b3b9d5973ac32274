"""The continuous engine on whole traces."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from kvtrie.sim.config import config_of
from kvtrie.sim.run import run_config
from kvtrie.sim.trace import read_trace, write_trace
from kvtrie.sim.workloads import conversations

LANE = {"bytes_per_s": 50e9}


def played(path, engine, *, blocks, output=True):
    """The figures of a trace on two machines, and its lines."""
    document = {
        "machines": 2,
        "trace": {"path": str(path), "format": "mooncake", "output": output},
        "model": {"layers": 32, "kv_heads": 8, "head_dim": 128, "dtype": "float16"},
        "cost": {"kind": "affine", "ns_per_token": 20_000, "alpha": 0.0001},
        "engine": {"kind": "continuous", **engine},
        "tiers": [
            {"kind": "gpu", "blocks": blocks, "write": "through"},
            {"kind": "host", "blocks": 4 * blocks, "read": LANE, "store": LANE},
        ],
    }
    lines = []
    figures = run_config(config_of(document, Path()), lines.append)
    return {**figures, "wall_s": 0}, lines


def generated(folder):
    """A trace of conversations in little room."""
    path = folder / "generated.jsonl"
    trace = conversations(seed=3, chats=200, turns=6, active=40)
    # Faster and with longer answers, so that many decode at a time.
    rows = [
        replace(request, at=request.at // 10, output_tokens=8 * request.output_tokens)
        for request in trace
    ]
    write_trace(path, rows)
    return path, 60


def published(folder):
    """The first requests of the trace that KVTRIE_TRACE names."""
    given = os.environ.get("KVTRIE_TRACE")
    if given is None:
        pytest.skip("no KVTRIE_TRACE")
    path = folder / "published.jsonl"
    write_trace(path, read_trace(Path(given))[:2000])
    return path, 1000


@pytest.mark.parametrize("trace", [generated, published])
def test_jumps_over_decoding_change_nothing(tmp_path, trace):
    path, blocks = trace(tmp_path)
    jumps = played(path, {}, blocks=blocks)
    assert jumps == played(path, {"token_by_token": True}, blocks=blocks)
    figures, lines = jumps
    assert figures["requests"] == len(lines) > 500
    assert figures["suspended"] > 0
    # Answers take room, and time of their own.
    without, _ = played(path, {}, blocks=blocks, output=False)
    assert without["suspended"] == 0
    assert without["e2e_ns"]["mean"] < figures["e2e_ns"]["mean"]
