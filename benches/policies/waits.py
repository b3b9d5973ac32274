"""First-token times in the simulator, by policy and load.

One H100 serves 8 billion parameters with the continuous engine, as `docs/simulator.md` has both.
The sustained throughput of a trace is the highest rate, within 10 %, at which a run under `lru`
ends at most a twentieth of its length after the last arrival; a load is a share of it, and the
arrivals of the first `PLAYED` requests are stretched to it.
`DIRECT`: the manager of the run evicts. `GIVEN`: the machine has room for all, and blocks are
renamed so that each prompt finds those that a replay under the policy found: so runs a policy that
kvtrie does not have. Cost: seconds each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benches.policies.cells import objective_of, whole
from benches.policies.finds import finds, middle
from benches.policies.traces import Source, trace_of
from kvtrie.sim.config import config_of
from kvtrie.sim.figures import figures_of
from kvtrie.sim.run import open_simulation, play

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvtrie.sim.readers.rows import RowWithMore
    from kvtrie.sim.trace import TraceRequest

DIRECT, GIVEN = "first token", "first token, finds given"
LOADS = (50, 80)
LATE, WITHIN = 1.05, 1.1
# Requests of a run, the first ones of its trace.
PLAYED = 3000
NS = 1e9


@dataclass(frozen=True, slots=True)
class Wait:
    """Times to the first token in seconds, at a load in per cent of the sustained throughput.

    Attributes:
        per_s: requests per second.
        refused: requests that did not fit on the first tier.
    """

    trace: str
    seed: int
    room: int
    structure: str
    load: int
    policy: str
    mean: float
    p50: float
    p90: float
    per_s: float
    refused: int

    @property
    def key(self) -> tuple[str, int, int, str, int, str]:
        """Trace, seed, room, structure, load and policy."""
        return (self.trace, self.seed, self.room, self.structure, self.load, self.policy)


def run(
    requests: Sequence[TraceRequest], size: int, room: int, policy: str, scale: float
) -> dict[str, Any]:
    """The figures of a run whose arrivals are `scale` times as late."""
    tables: dict[str, Any] = {
        "trace": {"path": "-", "format": "mooncake", "hash_tokens": size},
        "model": {"layers": 32, "kv_heads": 8, "head_dim": 128, "query_heads": 32, "hidden": 4096},
        "manager": {
            "block_tokens": size,
            "policy": policy.partition(",")[0],
            "objective": objective_of(policy),
        },
        "engine": {"kind": "continuous"},
        "cost": {"kind": "roofline", "parameters": 8e9, "device": "H100"},
        "tiers": [{"kind": "gpu", "blocks": room}],
    }
    config = config_of(tables, Path())
    simulation = open_simulation(config)

    def rows() -> Iterator[RowWithMore]:
        for request in requests:
            at, answer = round(scale * request.at), request.answer
            more = {} if answer is None else {"answer": answer}
            yield at, request.blocks, request.input_tokens, request.output_tokens, None, more

    return figures_of(config, simulation, play(config, simulation, rows()))


@cache
def sustained(source: Source) -> float:
    """How many times as late the arrivals are at the sustained throughput of `lru`."""
    requests, room = trace_of(source)[:PLAYED], middle(source)
    last = requests[-1].at

    def end(scale: float) -> int:
        return run(requests, source.block_tokens, room, "lru", scale)["end_ns"]

    def late(scale: float) -> bool:
        return end(scale) > LATE * scale * last

    # With all requests at once the machine is never idle, but finds little of what it computes.
    high = end(0.0) / last
    while late(high):
        high *= 2
    low = high / 4
    while high > WITHIN * low:
        scale = (low * high) ** 0.5
        low, high = (scale, high) if late(scale) else (low, scale)
    return high


def renamed(requests: Sequence[TraceRequest], found: Sequence[int]) -> list[TraceRequest]:
    """The same requests, in which blocks that were not found again have new names."""
    most = max(int(whole(request).blocks.max()) for request in requests)
    names, used = np.zeros(most + 1, dtype=np.uint32), 0
    made: list[TraceRequest] = []
    for request, n in zip(requests, found, strict=True):
        path = whole(request).blocks
        new = len(path) - n
        names[path[n:]] = np.arange(used, used + new)
        used += new
        answer = None if request.answer is None else names[request.answer]
        blocks = names[request.blocks]
        made.append(replace(request, blocks=blocks, answer=answer))
    return made


def room_for_all(requests: Sequence[TraceRequest], size: int) -> int:
    """Blocks of all prompts and answers, each as often as it is computed."""
    names = max(int(whole(request).blocks.max()) for request in requests) + 1
    return names + sum(2 + request.output_tokens // size for request in requests)


def waits(source: Source, structure: str, policy: str) -> list[Wait]:
    """The times of a policy at each load."""
    requests, room, size = trace_of(source)[:PLAYED], middle(source), source.block_tokens
    blocks, under = room, policy
    if structure == GIVEN:
        requests = renamed(requests, finds(source, room, policy)[:PLAYED])
        blocks, under = room_for_all(requests, size), "lru"
    made: list[Wait] = []
    for load in LOADS:
        scale = sustained(source) * 100 / load
        figures = run(requests, size, blocks, under, scale)
        times = (round(figures["ttft_ns"][name] / NS, 4) for name in ("mean", "p50", "p90"))
        per_s = round(len(requests) / (scale * requests[-1].at / NS), 4)
        key = (source.name, source.seed, room, structure, load, policy)
        made.append(Wait(*key, *times, per_s, figures["refused"]))
    return made
