"""Layer-wise bookkeeping of one long prompt, ours and the peer's in one run: table and document.

    make bench-transfer ARGS="--rounds 3"

The peer is LMCache where `make peers ARGS=lmcache` has installed it; elsewhere our own dictionary
with one entry per chunk and layer stands in for it and is named so. Rounds alternate: peer, then
ours. Best and median over the rounds are reported, ratios are of the bests. No bytes are moved on
either side. Cost: half a minute a round.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benches.core.place import place
from benches.core.referee import DriverError, Line, interpreter, run
from benches.core.rows import OURS, Play
from benches.record import Result, document, write

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


def plays() -> list[Play]:
    """The peer or its stand-in, then ours."""
    peer = Play("lmcache", "benches.peers.lmcache_layers", ())
    if interpreter("lmcache") is None:
        peer = Play(OURS, LAYERS, ("--naive",))
    return [peer, *(Play(OURS, LAYERS, ("--block", block)) for block in ("256", "16"))]


def rows_of(lines: list[Line]) -> list[Result]:
    """A row per part and block size, ours beside the peer."""
    rows: list[Result] = []
    for part in PARTS:
        here = [line for line in lines if line.what == f"layerwise.{part}"]
        peers = [line for line in here if line.peer != OURS]
        for block in (256, 16):
            ours = [x for x in here if x.peer == OURS and x.context["block"] == block]
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
    parser = argparse.ArgumentParser(prog="benches.transfer", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--json", action="store_true", help="print the document, not the table")
    given = parser.parse_args()
    told = Console(stderr=True)
    order = plays() * given.rounds
    try:
        lines = [
            line
            for play in track(order, "Layer-wise books", console=told, transient=True)
            for line in run(play)
        ]
    except DriverError as error:
        told.print(str(error), highlight=False)
        return 1
    rows = rows_of(lines)
    where = {**place(), "rounds": given.rounds, "tokens": 32_768, "layers": 32}
    where["lines"] = [asdict(line) for line in lines]
    kept = document(where, rows)
    write(given.out, kept)
    if given.json:
        sys.stdout.write(json.dumps(kept) + "\n")
        return 0
    table = Table("", "ours ms, best (median)", "peer ms", "ratio", "goal", "")
    for row in rows:
        table.add_row(
            row.what,
            f"{row.ours:.3g} ({row.more['ours_median']:.3g})",
            f"{row.peer_name} {row.peer:.3g} ({row.more['peer_median']:.3g})",
            f"{row.ratio:.3g}",
            "-" if row.goal is None else f"{row.goal:g}",
            "" if row.more["within_budget"] else f"above {GOAL_MS:g} ms",
        )
    Console(width=120).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
