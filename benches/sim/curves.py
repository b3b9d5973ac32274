"""The curve of LRU over capacity in one pass, and a replay with each capacity.

    make bench-sim-curves ARGS="--trace mooncake_conversation_trace.jsonl --sessions agents.jsonl"

Per trace 20 capacities at equal ratios, from the smallest that holds every request to one that
finds all; `common`, whose 64 running requests hold their blocks, from 30 000 blocks on. Ours is the
processor time of the one pass with all 20 shares, the peer's that of two replays, in the mean over
the 20. A row is reached if the pass takes no longer and no share is more than .5 points off.
Cost: ten minutes.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.progress import track

from benches.core.place import place
from benches.policies.traces import (
    AGENTS,
    COMMON,
    COMMON_ROOMS,
    CONVERSATION,
    Source,
    trace_of,
)
from benches.record import Result, document, keep, options, show
from kvtrie import Tier
from kvtrie.sim.capacities import BlockPath, lru_curve
from kvtrie.sim.replay import open_manager, replay

if TYPE_CHECKING:
    from collections.abc import Sequence

OUT = Path(__file__).parents[1] / "results/sim_curves.json"
POINTS, REQUESTS = 20, 100_000
MOST = 0.5


def row_of(source: Source, points: int, *, quiet: bool) -> Result:
    """The row of one trace."""
    requests = trace_of(source)
    begun = time.process_time()
    paths = [BlockPath(one.blocks, len(one.blocks), 0, one.answer) for one in requests]
    curve = lru_curve(paths)
    least = max(curve.least, COMMON_ROOMS[0] if source.name == COMMON else 0)
    last = max(least, len(curve.found) - 1)
    capacities = sorted({round(one) for one in np.geomspace(least, last, points)})
    shares = [curve.hits(one) / curve.blocks for one in capacities]
    ours = time.process_time() - begun
    seconds: list[float] = []
    off: list[float] = []
    for capacity, share in track(
        list(zip(capacities, shares, strict=True)), source.name, disable=quiet
    ):
        begun = time.process_time()
        manager = open_manager(
            [Tier("gpu", blocks=capacity, write="never")],
            policy="lru",
            block_tokens=source.block_tokens,
        )
        played = replay(requests, manager, block_tokens=source.block_tokens, running=source.running)
        seconds.append(time.process_time() - begun)
        off.append(100 * (share - played.hit_rate))
    two, worst = 2 * float(np.mean(seconds)), max(map(abs, off))
    more = {"requests": len(requests), "blocks": curve.blocks, "capacities": capacities}
    return Result(
        f"{source.name}, lru",
        round(ours, 3),
        "s",
        round(two, 3),
        "two replays",
        round(two / ours, 3),
        1.0,
        ours <= two and worst <= MOST,
        more | {"points_off": [round(one, 4) for one in off], "worst": round(worst, 4)},
    )


def rows_of(sources: Sequence[Source], points: int, *, quiet: bool) -> list[Result]:
    """The rows of all traces."""
    return [row_of(source, points, quiet=quiet) for source in sources]


def main() -> int:
    """Play, report, record."""
    parser = options(__doc__, OUT)
    parser.add_argument("--trace", default=os.environ.get("KVTRIE_TRACE"), metavar="FILE")
    parser.add_argument("--sessions", default=os.environ.get("KVTRIE_SESSIONS"), metavar="FILE")
    given = parser.parse_args()
    sources, points = [Source(COMMON, None, 0, 2000 if given.quick else REQUESTS)], POINTS
    if given.quick:
        points = 3
    elif given.trace is None or given.sessions is None:
        parser.error("--trace and --sessions wanted, or KVTRIE_TRACE and KVTRIE_SESSIONS")
    else:
        named = ((CONVERSATION, given.trace), (AGENTS, given.sessions))
        sources = [Source(name, path, 0, 0) for name, path in named] + sources
    rows = rows_of(sources, points, quiet=given.json)
    if not keep(given, document(place(), rows)):
        show(rows, [f"{row.what}: at most {row.more['worst']} points off" for row in rows])
    return 0


if __name__ == "__main__":
    sys.exit(main())
