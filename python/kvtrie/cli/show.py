"""`kvtrie map` and `kvtrie stats`: what a report says."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kvtrie.errors import ConfigError

if TYPE_CHECKING:
    import argparse

    from kvtrie.cli.commands import Commands

__all__ = ["add_map", "add_stats"]

_REPORT = "written by `kvtrie demo --save` or `kvtrie replay --save`"


def add_map(commands: Commands) -> None:
    """Add `kvtrie map` to the parser."""
    parser = commands.add_parser(
        "map",
        help="which layers of which session are where",
        description=f"Draws the sessions and layers of a report ({_REPORT}): on which tier they "
        "were, or dropped.",
    )
    parser.add_argument("report", type=Path, metavar="FILE", help=f"a report, {_REPORT}")
    parser.add_argument("--session", metavar="NAME", help="one session, block by block")
    parser.add_argument(
        "--out", type=Path, metavar="PICTURE", help="draw a picture (PNG, SVG or PDF) instead"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=_map)


def add_stats(commands: Commands) -> None:
    """Add `kvtrie stats` to the parser."""
    parser = commands.add_parser(
        "stats",
        help="what each tier held and did",
        description=f"Prints the counters of all tiers of a report ({_REPORT}).",
    )
    parser.add_argument("report", type=Path, metavar="FILE", help=f"a report, {_REPORT}")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=_stats)


def _map(given: argparse.Namespace) -> int:
    from kvtrie.demo.chart import overview, session_map
    from kvtrie.demo.report import read_report

    report = read_report(given.report)
    if given.session is not None and given.session not in report.sessions:
        known = ", ".join(report.sessions) or "none"
        raise ConfigError(f"there is no session {given.session!r} in {given.report}, only {known}")
    chosen = {
        name: where for name, where in report.sessions.items() if given.session in (None, name)
    }
    if given.out is not None:
        try:
            from kvtrie.demo.picture import draw_map
        except ImportError as error:
            raise ConfigError(
                f"{error.name} is not installed; pictures need: pip install 'kvtrie[cli]'"
            ) from error
        draw_map(given.out, report.title, list(chosen), list(chosen.values()))
        return 0
    if given.json:
        tiers = [*report.tiers, "dropped"]
        sessions = {name: where.tolist() for name, where in chosen.items()}
        text = json.dumps({"title": report.title, "tiers": tiers, "sessions": sessions})
    elif given.session is not None:
        text = session_map(report, given.session)
    else:
        text = overview(report)
    sys.stdout.write(text + "\n")
    return 0


def _stats(given: argparse.Namespace) -> int:
    from kvtrie.demo.chart import tier_table
    from kvtrie.demo.report import read_report

    report = read_report(given.report)
    figures = {"title": report.title, "tiers": report.tiers}
    sys.stdout.write((json.dumps(figures) if given.json else tier_table(report)) + "\n")
    return 0
