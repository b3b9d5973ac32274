"""Layer-wise bookkeeping of one long prompt, ours and the peer's in one run: table and document.

    make bench-transfer ARGS="--rounds 3"

The peer is LMCache where `make peers ARGS=lmcache` has installed it; elsewhere our own dictionary
with one entry per chunk and layer stands in for it and is named so. Rounds alternate: peer, then
ours. Best and median over the rounds are reported, ratios are of the bests. No bytes are moved on
either side. Cost: half a minute a round.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.progress import track

from benches.core.place import place
from benches.core.referee import DriverError, Line, interpreter, run
from benches.core.rows import OURS, Play
from benches.record import Result, document, keep, options, show

OUT = Path(__file__).parent / "results/transfer.json"
GOAL_MS = 1.0
# Ratios to LMCache that were recorded on 2026-11-22, less a tenth, by part and tokens of a block.
GOALS = {
    ("lookup", 256): 3350,
    ("lookup", 16): 2500,
    ("store", 256): 77.7,
    ("store", 16): 43.4,
    ("retrieve", 256): 44.8,
    ("retrieve", 16): 25.6,
}
PARTS = ("lookup", "store", "retrieve")
LAYERS = "benches.ours.layers"


def plays(*, quick: bool) -> list[Play]:
    """The peer or its stand-in, then ours; the stand-in and short prompts if it is to be quick."""
    small = ("--tokens", "2048", "--prompts", "1") if quick else ()
    peer = Play("lmcache", "benches.peers.lmcache_layers", ())
    if quick or interpreter("lmcache") is None:
        peer = Play(OURS, LAYERS, ("--naive", *small))
    return [peer, *(Play(OURS, LAYERS, ("--block", block, *small)) for block in ("256", "16"))]


def rows_of(lines: list[Line]) -> list[Result]:
    """A row per part and block size, compared with the peer."""
    rows: list[Result] = []
    for part in PARTS:
        lines_of_part = [line for line in lines if line.what == f"layerwise.{part}"]
        peers = [line for line in lines_of_part if line.peer != OURS]
        for block in (256, 16):
            ours = [x for x in lines_of_part if x.peer == OURS and x.context["block"] == block]
            best, other = min(x.value for x in ours), min(x.value for x in peers)
            ratio = round(other / best, 2)
            goal = GOALS[part, block] if peers[0].peer == "LMCache" else None
            rows.append(
                Result(
                    what=f"{part}.{block}",
                    ours=best,
                    unit="ms",
                    peer=other,
                    peer_name=peers[0].peer,
                    ratio=ratio,
                    goal=goal,
                    ok=None if goal is None else ratio >= goal,
                    more={
                        "ours_median": median(x.context["median"] for x in ours),
                        "peer_median": median(x.context["median"] for x in peers),
                        "within_budget": best < GOAL_MS,
                    },
                )
            )
    return rows


def main() -> int:
    """Play, write, print."""
    parser = options(__doc__, OUT)
    parser.add_argument("--rounds", type=int, help="default: 3")
    given = parser.parse_args()
    rounds = given.rounds or (1 if given.quick else 3)
    screen = Console(stderr=True)
    order = plays(quick=given.quick) * rounds
    try:
        lines = [
            line
            for play in track(order, "Layer-wise books", console=screen, transient=True)
            for line in run(play)
        ]
    except DriverError as error:
        screen.print(str(error), highlight=False)
        return 1
    rows = rows_of(lines)
    where = {**place(), "rounds": rounds, "tokens": 32_768, "layers": 32}
    where["lines"] = [asdict(line) for line in lines]
    if not keep(given, document(where, rows)):
        late = [row.what for row in rows if not row.more["within_budget"]]
        show(rows, [f"above {GOAL_MS:g} ms: {', '.join(late)}"] if late else [])
    return 0


if __name__ == "__main__":
    sys.exit(main())
