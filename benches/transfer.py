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
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benches.core.place import place
from benches.core.referee import DriverError, Line, interpreter, run
from benches.core.rows import OURS, Play

OUT = Path(__file__).parent / "results/transfer.json"
GOAL_MS = 1.0
PARTS = ("lookup", "store", "retrieve")
LAYERS = "benches.ours.layers"


def plays() -> list[Play]:
    """The peer or its stand-in, then ours."""
    peer = Play("lmcache", "benches.peers.lmcache_layers", ())
    if interpreter("lmcache") is None:
        peer = Play(OURS, LAYERS, ("--naive",))
    return [peer, *(Play(OURS, LAYERS, ("--block", block)) for block in ("256", "16"))]


def rows_of(lines: list[Line]) -> list[dict[str, Any]]:
    """A row per part and block size, ours beside the peer."""
    rows: list[dict[str, Any]] = []
    for part in PARTS:
        here = [line for line in lines if line.what == f"layerwise.{part}"]
        peers = [line for line in here if line.peer != OURS]
        for block in (256, 16):
            ours = [x for x in here if x.peer == OURS and x.context["block"] == block]
            best, other = min(x.value for x in ours), min(x.value for x in peers)
            rows.append(
                {
                    "what": part,
                    "block": block,
                    "ours_ms": best,
                    "ours_median_ms": median(x.context["median"] for x in ours),
                    "peer": peers[0].peer,
                    "peer_ms": other,
                    "peer_median_ms": median(x.context["median"] for x in peers),
                    "ratio": round(other / best, 2),
                    "goal_ms": GOAL_MS,
                    "ok": best < GOAL_MS,
                }
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
    document = {
        "place": place(),
        "rounds": given.rounds,
        "tokens": 32_768,
        "layers": 32,
        "rows": rows,
        "lines": [asdict(line) for line in lines],
    }
    given.out.write_text(json.dumps(document, indent=1) + "\n")
    if given.json:
        sys.stdout.write(json.dumps(document) + "\n")
        return 0
    table = Table("", "block", "ours ms, best (median)", "peer ms", "ratio", "goal ms")
    for row in rows:
        table.add_row(
            row["what"],
            str(row["block"]),
            f"{row['ours_ms']:.3g} ({row['ours_median_ms']:.3g})",
            f"{row['peer']} {row['peer_ms']:.3g} ({row['peer_median_ms']:.3g})",
            f"{row['ratio']:.3g}",
            f"{row['goal_ms']:g}{'' if row['ok'] else ', not reached'}",
        )
    Console(width=120).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
