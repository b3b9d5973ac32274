"""Mooncake's conversation trace under LRU: hits by block, and tokens of its last half.

By block, compared with figures that were found by hand in a published trace; by token, with
kvcache-simulator in the same run, if that is installed. Cost: half a minute.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from benches.core.referee import interpreter, run
from benches.core.rows import Play
from benches.record import Result
from kvtrie import ModelShape, Tier
from kvtrie.sim.config import SimulationConfig, TraceSource
from kvtrie.sim.config.cost import cost_of
from kvtrie.sim.config.table import Table
from kvtrie.sim.replay import open_manager, replay
from kvtrie.sim.run import run_config
from kvtrie.sim.trace import read_trace

if TYPE_CHECKING:
    from pathlib import Path

PEER = "kvcache-simulator"
BY_HAND = {5859: 0.1361, 97_656: 0.3635, 10_000_000: 0.3664}
BY_HAND_WITHIN = 0.0001
ROOMS = {5859: 0.137, 16_000: 0.276, 50_000: 0.377}
WITHIN = 0.001  # a tenth of a point
TOKENS = 512


def hits_by_block(trace: Path) -> list[Result]:
    """Shares of all blocks that `kvtrie replay` finds."""
    requests = read_trace(trace)
    rows: list[Result] = []
    for blocks, published in BY_HAND.items():
        played = replay(requests, open_manager([Tier("gpu", blocks=blocks)], policy="lru"))
        name = "all" if blocks > played.blocks else str(blocks)
        what = f"blocks.{name}"
        rows.append(within_row(what, played.hit_rate, published, "by hand", BY_HAND_WITHIN))
    return rows


def tokens_of_last_half(trace: Path) -> tuple[list[Result], list[str]]:
    """Shares of the tokens of the last half of all requests that `kvtrie sim` finds."""
    theirs = dict(ROOMS)
    peer, notes = "published", []
    if interpreter(PEER) is None:
        notes = [f"{PEER}: not installed, its published figures stand in: make peers ARGS={PEER}"]
    else:
        words = [word for room in ROOMS for word in ("--blocks", str(room))]
        lines = run(Play(PEER, "benches.peers.kvcache_simulator", (str(trace), *words)))
        theirs |= {room: line.value for room, line in zip(ROOMS, lines, strict=False)}
        peer = PEER
    ours = {room: _last_half(trace, room) for room in ROOMS}
    rows = [within_row(f"tokens.{room}", ours[room], theirs[room], peer, WITHIN) for room in ROOMS]
    return rows, notes


def _last_half(trace: Path, blocks: int) -> float:
    model = ModelShape(layers=32, kv_heads=8, head_dim=128, dtype="float16")
    price, cost = cost_of(Table("cost", {"ns_per_token": 1000, "alpha": 0}), model)
    config = SimulationConfig(
        trace=TraceSource(trace, "mooncake", output=False),
        model=model,
        tiers=(Tier("gpu", blocks=blocks, owner="none"),),
        price=price,
        cost=cost,
        block_tokens=TOKENS,
        manager={"policy": "lru", "keep": 0},
    )
    found: list[tuple[int, int]] = []

    def on_request(line: dict[str, object]) -> None:
        hits: dict[str, int] = line["hit_tokens"]  # type: ignore[assignment]
        computed: int = line["computed_tokens"]  # type: ignore[assignment]
        found.append((sum(hits.values()), computed))

    run_config(config, on_request)
    half = found[len(found) // 2 :]
    return sum(hits for hits, _ in half) / sum(hits + computed for hits, computed in half)


def within_row(what: str, ours: float, peer: float, name: str, within: float) -> Result:
    """A row that is right if ours is so near to the peer's figure."""
    # The known figures are rounded to the fourth place, or to a tenth of a point.
    ok = abs(ours - peer) <= within
    return Result(
        what=what,
        ours=round(ours, 4),
        unit="share",
        peer=round(peer, 4),
        peer_name=name,
        ratio=round(ours / peer, 4),
        goal=1.0,
        ok=ok,
        more={"within": within},
    )
