"""`kvtrie map` and `kvtrie stats`: the pictures of a report."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kvtrie.cli.output_file import output_file
from kvtrie.errors import ConfigError

if TYPE_CHECKING:
    import argparse

__all__ = ["MAP", "STATS"]


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "report",
        type=Path,
        metavar="FILE",
        help="written by `kvtrie demo --save` or `kvtrie replay --save`",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON document")


def _map_arguments(parser: argparse.ArgumentParser) -> None:
    _common(parser)
    parser.add_argument("--session", metavar="NAME", help="a session, block by block")
    parser.add_argument(
        "--out",
        type=output_file,
        metavar="PICTURE",
        help="draw a picture (PNG, SVG or PDF) instead",
    )
    parser.set_defaults(run=_map)


def _stats_arguments(parser: argparse.ArgumentParser) -> None:
    _common(parser)
    parser.set_defaults(run=_stats)


def _map(given: argparse.Namespace) -> int:
    from kvtrie.demo.chart import overview, session_map
    from kvtrie.demo.report import read_report

    report = read_report(given.report)
    if given.session is not None and given.session not in report.sessions:
        names = ", ".join(report.sessions) or "none"
        raise ConfigError(f"there is no session {given.session!r} in {given.report}, only {names}")
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


MAP = ("draw which layers of which session were on which tier, from a report", _map_arguments)
"""Help text of the command, and its function for arguments."""
STATS = ("print what each tier held and did, from a report", _stats_arguments)
"""Help text of the command, and its function for arguments."""
