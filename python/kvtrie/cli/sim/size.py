"""`kvtrie sim size`: the cheapest rooms for some goals, as text or JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtrie.cli.lenient import status_of
from kvtrie.cli.progress import counting
from kvtrie.cli.sim.settings import add_settings, changes_in
from kvtrie.settings.argument import real, whole

if TYPE_CHECKING:
    import argparse

    from kvtrie.sim.size import Sized, Sizes

__all__ = ["ACTION"]

_MISSED = 1
_NS_PER_MS = 1e6


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_settings(parser)
    parser.add_argument(
        "--goal",
        action="append",
        required=True,
        metavar="FIGURE=NS",
        help="limit of ttft, tpot or e2e, as ttft_p99_ns=2e9. All goals must be met",
    )
    parser.add_argument(
        "--over",
        action="append",
        required=True,
        metavar="KEY=LOW:HIGH",
        help="a room and its range, as tiers.1.blocks=1000:100000. Several are traded by price",
    )
    parser.add_argument(
        "--within",
        type=float,
        default=0.01,
        metavar="SHARE",
        help="closer rooms count as equal (default: 0.01)",
    )
    parser.add_argument(
        "--points",
        type=int,
        default=6,
        metavar="N",
        help="first trials in each range except the last (default: 6)",
    )
    parser.add_argument(
        "--results",
        type=Path,
        metavar="FILE",
        help="append each result as it comes, and continue from existing results",
    )
    parser.set_defaults(run=_run)


def _run(given: argparse.Namespace) -> int:
    from kvtrie.sim.grid import variation
    from kvtrie.sim.size import Sizes, axis_of, goal_of

    sizes = Sizes(
        make=variation(given.config, changes_in(given), "--over"),
        goals=dict(goal_of(stated) for stated in given.goal),
        axes=[axis_of(stated) for stated in given.over],
        within=real("--within", given.within, 0, 1),
        points=whole("--points", given.points, 1, 1000),
        results=given.results,
    )
    with counting("Simulating, runs:") as sizes.on_run:
        found = sizes.cheapest()
    status = _MISSED if found is None else status_of(found.figures)
    if given.json:
        document: dict[str, Any] = {"runs": len(sizes.seen), "found": None}
        if found is not None:
            names = ("values", "cost", "below", "figures")
            document["found"] = {name: getattr(found, name) for name in names}
        sys.stdout.write(json.dumps(document) + "\n")
    else:
        sys.stdout.write(_text(sizes, found))
    return status


def _text(sizes: Sizes, found: Sized | None) -> str:
    if found is None:
        return f"the largest rooms miss the goals ({len(sizes.seen)} runs)\n"
    text = ""
    for name, room in found.values.items():
        below = found.below[name]
        missed = "the range ends there" if below is None else f"{below} misses the goals"
        text += f"{name} = {room}  ({missed})\n"
    for name, most in sizes.goals.items():
        time, part, _ = name.split("_")
        spread = found.figures[f"{time}_ns"]
        seen = 0 if spread is None else spread[part]
        text += f"{time} {part} {seen / _NS_PER_MS:.3f} ms, at most {most / _NS_PER_MS:.3f} ms\n"
    unit = "GiB" if found.figures["cost"] is None else "per hour"
    return f"{text}{found.cost:.4f} {unit}, {len(sizes.seen)} runs\n"


ACTION = ("the cheapest rooms with which all goals are met", _arguments)
"""Help text of the action, and its function for arguments."""
