"""Eviction policies on conversations of ShareGPT's lengths: one tier, and two with layer slots.

`SHAREGPT=FILE` plays the real file instead of the one that is made up from its means. Rows are
shares of prompt tokens found; the peer is lru in the same room. No goal: which policy wins depends
on the trace. Cost: a minute.
"""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from benches.record import Result
from kvtrie import BlockManager, ModelShape, Tier
from kvtrie.sim.arrivals import Arrivals
from kvtrie.sim.config import TraceSource
from kvtrie.sim.replay import replay
from kvtrie.sim.requests import block_requests
from kvtrie.sim.workloads.sharegpt import ShareGptLike

if TYPE_CHECKING:
    from kvtrie.sim.trace import TraceRequest

FILE = "SHAREGPT"
POLICIES = ("lru", "flat", "weighted", "checkerboard", "retention")
BLOCK = 32
REQUESTS = 4000
ROOM = 0.1  # of the distinct blocks
LAYERS = 8
PER_S = 1.0
THINK_S = 60.0


def sessions(requests: int) -> tuple[str, list[TraceRequest]]:
    """Name and requests of the trace."""
    arrivals = Arrivals(per_s=PER_S)
    file = os.environ.get(FILE)
    if file:
        source = TraceSource(
            Path(file), "sharegpt", arrivals=arrivals, think_s=THINK_S, lenient=True
        )
        return Path(file).name, list(islice(block_requests(source, BLOCK), requests))
    made = ShareGptLike(requests=requests, think_s=THINK_S, arrivals=arrivals)
    source = TraceSource(Path("sharegpt-like"), "sharegpt-like", generator=made)
    return "sharegpt-like", list(block_requests(source, BLOCK))


def compared(count: int) -> tuple[list[Result], list[str]]:
    """A row per policy and set of tiers."""
    name, requests = sessions(count)
    distinct = len({block for request in requests for block in request.blocks.tolist()})
    longest = max(len(request.blocks) for request in requests)
    room = max(longest, round(ROOM * distinct))
    rows: list[Result] = []
    for layered, tiers in enumerate(_tiers(room)):
        found: dict[str, float] = {}
        for policy in POLICIES:
            manager = BlockManager(
                ModelShape(layers=LAYERS, kv_heads=2, head_dim=64, dtype="float16"),
                tiers,
                block_tokens=1,
                token_weight=BLOCK,
                policy=policy,
            )
            found[policy] = replay(requests, manager, block_tokens=BLOCK).token_rate
            rows.append(
                Result(
                    what=f"A41.{'two_tiers' if layered else 'one_tier'}.{policy}",
                    ours=round(found[policy], 4),
                    unit="share",
                    peer=round(found["lru"], 4),
                    peer_name="lru",
                    ratio=round(found[policy] / found["lru"], 4),
                    more={"trace": name, "blocks": [tier.blocks for tier in tiers]},
                )
            )
    return rows, [f"policies: {name}, {len(requests)} requests, {room} of {distinct} blocks"]


def _tiers(room: int) -> list[list[Tier]]:
    return [
        [Tier("gpu", blocks=room, owner="none")],
        [
            Tier("gpu", blocks=max(1, room // 2), owner="none", layer_slots=True),
            Tier("host", blocks=room, owner="none", layer_slots=True),
        ],
    ]
