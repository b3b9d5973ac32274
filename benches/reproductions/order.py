"""The cost-model document's measured effects and scenarios: which layers of which blocks leave.

Each is a short trace through a manager without bytes, whose log of evictions is read. `ours` is the
number of evictions (or blocks) that are as the document says, `peer` how many there are.
Cost: none.
"""

from __future__ import annotations

import math

import numpy as np

from benches.record import Result
from kvtrie import BlockManager, ModelShape, Tier
from kvtrie.sim.replay import replay
from kvtrie.sim.trace import TraceRequest

DOCUMENT = "cost-model document"
LAYERS = 40
ROOM = 64
PAUSE = 1 << 40  # ns between a session and the next: another age class

Order = list[tuple[int, int]]  # (layer, position) of each eviction


def scenarios() -> list[Result]:
    """Rows for A34 (three effects) and A37 to A39."""
    return [
        _row("A34.leading_first", *leading_first()),
        _row("A34.back_layers_first", *back_layers_first(blocks=4)),
        _row("A34.older_sessions_first", *older_first()),
        _row("A37.three_sessions", *three_sessions()),
        _row("A38.five_turns", *five_turns()),
        _row("A39.two_blocks", *back_layers_first(blocks=2)),
    ]


def leading_first() -> tuple[int, int]:
    """With holes, the leading blocks of a session leave first."""
    order = [at for _, at in _evicted("checkerboard", 4, [(0, range(4)), (1, range(100, 104))])]
    return _equal(order, sorted(order)), 4


def back_layers_first(blocks: int) -> tuple[int, int]:
    """One session under pressure: layer 39 of all its blocks, then 38, to layer 0."""
    requests = [(0, range(blocks)), (1, range(100, 100 + blocks))]
    order = _evicted("checkerboard", blocks, requests, layered=True)
    wanted = [(layer, at) for layer in reversed(range(LAYERS)) for at in range(blocks)]
    return _equal(order, wanted), len(wanted)


def older_first() -> tuple[int, int]:
    """Three sessions, and a fourth that takes their room one after the other."""
    requests = [(n, [10 * n]) for n in range(3)] + [(3, range(100, 103))]
    manager = _manager("checkerboard", 3, layered=False)
    _play(manager, requests)
    blocks = [entry.block for entry in manager.evictions()]
    return _equal(blocks, sorted(blocks)), 3  # handles of blocks ascend as they are made


def three_sessions() -> tuple[int, int]:
    """Room for two blocks: the oldest session's L39C0, its L39C1, and so on to the front."""
    requests = [(0, range(2)), (1, [10]), (2, [20])]
    order = _evicted("checkerboard", 2, requests, layered=True)
    wanted = [(layer, at) for layer in reversed(range(LAYERS)) for at in range(2)]
    return _equal(order, wanted), len(wanted)


def five_turns() -> tuple[int, int]:
    """Five turns of a block each, room for three: the most recent stay."""
    requests = [(n, range(n + 1)) for n in range(5)] + [(5, [100, 101])]
    order = [at for _, at in _evicted("checkerboard", 5, requests)]
    return _equal(order, [0, 1]), 2


def _manager(policy: str, room: int, *, layered: bool) -> BlockManager:
    shape = ModelShape(layers=LAYERS, kv_heads=1, head_dim=16, dtype="float16")
    return BlockManager(
        shape,
        [
            Tier("gpu", blocks=room, owner="none", layer_slots=layered),
            Tier("host", blocks=ROOM, owner="none", layer_slots=layered),
        ],
        block_tokens=1,
        token_weight=32,
        policy=policy,
        structure="holes",
        cost="seed",
        eviction_log=4 * LAYERS * ROOM,
    )


def _play(manager: BlockManager, requests: list[tuple[int, object]]) -> None:
    replay(
        (
            TraceRequest(PAUSE * (at + 1), 32 * len(blocks), 1, blocks, session=str(at))
            for at, ids in requests
            for blocks in [np.array(list(ids), dtype=np.uint32)]  # type: ignore[call-overload]
        ),
        manager,
        block_tokens=32,
    )


def _evicted(
    policy: str, room: int, requests: list[tuple[int, object]], *, layered: bool = False
) -> Order:
    """The layers that left the first tier, in their order."""
    manager = _manager(policy, room, layered=layered)
    _play(manager, requests)
    order: Order = []
    for entry in manager.evictions():
        if entry.tier == 0:
            first, end = entry.layers
            # Of layers that are evicted at once the last layer comes first.
            order += [(layer, entry.position) for layer in reversed(range(first, end))]
    return order if layered else list(dict.fromkeys((0, at) for _, at in order))


def _equal(order: list, wanted: list) -> int:  # type: ignore[type-arg]
    """Number of entries at their place; the order may be longer."""
    return sum(a == b for a, b in zip(order, wanted, strict=False))


def _row(what: str, ours: int, wanted: int) -> Result:
    ratio = ours / wanted if wanted else math.nan
    return Result(
        what=what,
        ours=ours,
        unit="in order",
        peer=wanted,
        peer_name=DOCUMENT,
        ratio=round(ratio, 4),
        goal=1.0,
        ok=ours == wanted,
    )
