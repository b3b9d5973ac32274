"""The continuous engine on whole traces."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from kvtrie.errors import ConfigError
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
    return figures, lines


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
        pytest.skip("KVTRIE_TRACE names no Mooncake trace; its data are not in this repository")
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
    # Answers take room, and additional time.
    without, _ = played(path, {}, blocks=blocks, output=False)
    assert without["suspended"] == 0
    assert without["e2e_ns"]["mean"] < figures["e2e_ns"]["mean"]


DISAGGREGATED = {
    "machines": 3,
    "trace": {"path": "none.jsonl"},
    "model": {"layers": 4, "kv_heads": 1, "head_dim": 64, "dtype": "float16"},
    "engine": {"kind": "disaggregated"},
    "peers": {"bytes_per_s": 8_192_000},
    "tiers": [{"kind": "gpu", "blocks": 64}],
}


def test_a_disaggregated_engine_has_one_prefill_machine_by_default():
    config = config_of(DISAGGREGATED, Path())
    assert (config.manager["prefill"], config.manager["peers"]) == (1, None)
    assert config.manager["network"].bytes_per_s == 8_192_000
    both = config_of({**DISAGGREGATED, "peers": {"lookup": "all", "bytes_per_s": 5}}, Path())
    assert both.manager["network"] == both.manager["peers"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peers": {}}, 'peers.bytes_per_s is missing: engine.kind = "disaggregated"'),
        ({"engine": {"kind": "disaggregated", "prefill": 3}}, "engine.prefill is 3"),
        ({"engine": {"kind": "continuous", "prefill": 1}}, "engine.prefill is 1"),
        ({"machines": 1}, "machines is 1"),
    ],
)
def test_what_cannot_be_disaggregated_is_refused(change, message):
    with pytest.raises(ConfigError) as refused:
        config_of({**DISAGGREGATED, **change}, Path())
    assert message in str(refused.value)
