"""Models of several groups of layers: bytes, tokens found, one budget, and costs, with goals.

    make bench-hybrid ARGS="--sessions FILE --trace FILE"

Sessions of coding agents (in hashes of 64 tokens) and the conversation trace (of 512) are not part
of the project: without them (or KVTRIE_SESSIONS and KVTRIE_TRACE) their rows are left out. Our rows
use the default policy, and for tokens found `objective="hits"`, since the goals count tokens;
`cost` under `more` has the share of the default objective. `ours` is the figure that a goal bounds.
Cost: ten minutes.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benches.core.place import place
from benches.hybrid.core import BLOCK, memory, request
from benches.hybrid.first_token import first_token
from benches.record import Result, bounded, document, keep, options, show
from kvtrie import ResumePoints, Tier
from kvtrie.sim.models import model_named, without_groups
from kvtrie.sim.replay import open_manager, replay
from kvtrie.sim.trace import TraceRequest, read_trace
from kvtrie.sim.workloads import agents

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtrie import BlockManager
    from kvtrie.model.shape import ModelShape

OUT = Path(__file__).parents[1] / "results" / "hybrid.json"
GIB = 2**30
GEMMA, OSS, QWEN = "gemma-3-27b", "gpt-oss-120b", "qwen3-next-80b"
PAGE_WASTE = 1.05


def manager(
    model: ModelShape, room: int, points: ResumePoints | None, block_tokens: int, **more: Any
) -> BlockManager:
    """A manager on one tier of `room` bytes, or with `host` on two."""
    host = more.pop("host", 0)
    tiers = [Tier("gpu", bytes=room), *([Tier("host", bytes=host)] if host else [])]
    return open_manager(tiers, block_tokens=block_tokens, model=model, resume=points, **more)


def found(
    trace: Sequence[TraceRequest],
    what: str,
    name: str,
    room: tuple[int, int],
    goal: float,
    *,
    host: int = 0,
) -> Result:
    """Share of the tokens that are found, ours and without groups or with a point per block."""
    (gib, tokens), model = room, model_named(name)
    states = any(group.kind == "state" for group in model.groups)
    plain = (model, ResumePoints(every=512)) if states else (without_groups(model), None)
    peer = "--points 512, lru" if states else "--groups off, lru"

    def play(shape: ModelShape, points: ResumePoints | None, **settings: Any) -> float:
        opened = manager(shape, gib * GIB, points, tokens, host=host * GIB, **settings)
        return replay(trace, opened, block_tokens=tokens).token_rate

    ours, cost = (play(model, ResumePoints(), objective=one) for one in ("hits", "cost"))
    theirs = play(*plain, policy="lru")
    more = {"requests": len(trace), "block_tokens": tokens, "cost": round(cost, 4)}
    return Result(
        f"{what} {name} {gib}{f' + {host}' if host else ''}GiB",
        round(ours, 4),
        "of tokens",
        round(theirs, 4),
        peer,
        round(ours / theirs, 3) if theirs else None,
        round(goal / theirs, 3) if theirs else None,
        ours >= goal,
        more | {"wanted": goal},
    )


def held(name: str, tokens: int) -> tuple[list[int], ModelShape]:
    """Bytes by group that one sequence holds after its prompt."""
    model = model_named(name)
    opened = manager(model, 64 * GIB, ResumePoints(), BLOCK)
    blocks = np.arange(tokens // BLOCK, dtype=np.uint32)
    replay([TraceRequest(0, tokens, 1, blocks)], opened, block_tokens=BLOCK)
    slots = opened.stats().tiers["gpu"].groups
    each = [model.block_bytes(BLOCK, at) for at in range(len(slots))]
    return [size * one.held for size, one in zip(each, slots, strict=True)], model


def formula(name: str, tokens: int) -> Result:
    """Bytes held by one sequence, and those that attention needs at its end."""
    ours, model = held(name, tokens)
    wanted = 0
    for at, group in enumerate(model.groups):
        kept = {"full": tokens // BLOCK, "sliding": -(-(group.window - 1) // BLOCK), "state": 1}
        wanted += kept[group.kind] * model.block_bytes(BLOCK, at)
    words = f"formula {name}: {tokens} tokens"
    return bounded(words, sum(ours) / 2**20, wanted / 2**20, "MiB", "formula", PAGE_WASTE)


def all_layers(name: str, goal: float) -> Result:
    """The same, 64 windows long, and all layers of all tokens."""
    window = max(group.window for group in model_named(name).groups)
    ours, model = held(name, 64 * window)
    whole = 64 * window // BLOCK * without_groups(model).block_bytes(BLOCK)
    words = f"all layers {name}: {64 * window} tokens"
    return bounded(words, sum(ours) / 2**20, whole / 2**20, "MiB", "all layers", 1 / goal)


def usable(requests: int) -> Result:
    """Mean live share of a full tier while traffic turns from few long to many short sequences.

    The peer is a split of the bytes that is fixed for the first half.
    """
    model, room = model_named(GEMMA), 16 * GIB
    opened = manager(model, room, ResumePoints(), BLOCK)
    rng = np.random.default_rng(0)
    each = [model.block_bytes(BLOCK, at) for at in (0, 1)]
    halves: list[list[tuple[int, int]]] = [[], []]
    at = fresh = 0
    for half, (low, high, count) in enumerate([(2048, 4096, requests // 20), (64, 192, requests)]):
        for number in range(count):
            blocks = int(rng.integers(low, high))
            ids = np.arange(fresh, fresh + blocks, dtype=np.uint32)
            fresh, at = fresh + blocks, at + 10**9
            replay([TraceRequest(at, BLOCK * blocks, 1, ids)], opened, block_tokens=BLOCK)
            slots = opened.stats().tiers["gpu"].groups
            # The tier is full from the middle of each half on.
            if number > count // 2:
                pairs = zip(each, slots, strict=True)
                full, windows = (size * (one.held + one.released) for size, one in pairs)
                halves[half].append((full, windows))
    means = [np.mean(np.array(rows, dtype=float), axis=0) / room for rows in halves]
    ours = min(float(mean.sum()) for mean in means)
    # What a group has too little of, all of a sequence lacks.
    fixed = means[0] / means[0].sum()
    wanted = means[1] / means[1].sum()
    peer = float(min(fixed / wanted))
    goal, shares = 0.95, [round(float(mean.sum()), 4) for mean in means]
    return Result(
        "usable: live share of a full tier",
        round(ours, 4),
        "share",
        round(peer, 4),
        "split fixed for the first half",
        round(ours / peer, 3),
        round(goal / peer, 3),
        ours >= goal,
        {"halves": shares, "wanted": goal},
    )


def main() -> int:
    """Play, report, and keep what was whole."""
    parser = options(__doc__, OUT)
    for name, variable in (("--sessions", "KVTRIE_SESSIONS"), ("--trace", "KVTRIE_TRACE")):
        parser.add_argument(name, type=Path, default=os.environ.get(variable), metavar="FILE")
    given = parser.parse_args()
    long = 8192 if given.quick else 65_536
    rows = [formula(name, long) for name in (GEMMA, OSS, QWEN)]
    rows += [all_layers(GEMMA, 5), all_layers(OSS, 1.9), usable(60 if given.quick else 2000)]
    rows += [request(300 if given.quick else 5000), memory(20_000 if given.quick else 1_000_000)]
    rows.append(first_token(*(256, 1) if given.quick else (2048, 5)))
    trace = agents(requests=300 if given.quick else 10_000, seed=0)
    for name, gib, goal in ((GEMMA, 32, 0.80), (OSS, 8, 0.74), (QWEN, 8, 0.79)):
        rows.append(found(trace, "agents", name, (gib, 512), goal))
    words: list[str] = []
    if given.sessions:
        trace = read_trace(Path(given.sessions), hash_tokens=64)
        for name, goal in ((GEMMA, 0.19), (OSS, 0.49), (QWEN, 0.64)):
            rows.append(found(trace, "sessions", name, (32, 64), goal))
        rows.append(found(trace, "sessions", GEMMA, (32, 64), 0.7, host=128))
    else:
        words.append("sessions: left out, neither --sessions nor KVTRIE_SESSIONS names a file")
    if given.trace:
        trace = read_trace(Path(given.trace), hash_tokens=512)
        rows.append(found(trace, "mooncake", QWEN, (256, 512), 0.26))
    else:
        words.append("mooncake: left out, neither --trace nor KVTRIE_TRACE names a file")
    if not keep(given, document({**place(), "said": words}, rows)):
        show(rows, words)
    return 0


if __name__ == "__main__":
    sys.exit(main())
