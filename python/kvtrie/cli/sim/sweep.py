"""`kvtrie sim sweep` and `kvtrie sim compare`: a grid of settings, as a table, JSON or CSV."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtrie.cli.lenient import status_of
from kvtrie.cli.output_file import output_file
from kvtrie.cli.progress import watched
from kvtrie.cli.sim.drawn import draw_compared, draw_swept, labels_of
from kvtrie.cli.sim.settings import add_settings, changes_in

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from kvtrie.sim.grid import Cell

__all__ = ["COMPARE", "SWEEP"]

_DIGITS = {"found": 4, "per_million_tokens": 4}


def _sweep_arguments(parser: argparse.ArgumentParser) -> None:
    _common(parser, "--over")
    parser.add_argument(
        "--results",
        type=Path,
        metavar="FILE",
        help="append each result as it comes, and continue from existing results",
    )
    parser.set_defaults(run=_sweep)


def _compare_arguments(parser: argparse.ArgumentParser) -> None:
    _common(parser, "--vary")
    parser.set_defaults(run=_compare, results=None)


def _common(parser: argparse.ArgumentParser, option: str) -> None:
    add_settings(parser)
    parser.add_argument(
        option,
        dest="over",
        action="append",
        required=True,
        metavar="KEY=VALUE,VALUE",
        help="a setting and its values, as tiers.1.blocks=1000,2000. Several make a grid",
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FOLDER", help="draw pictures into a folder, made if missing"
    )
    parser.add_argument(
        "--csv", type=output_file, metavar="FILE", help="write all figures, a row per run"
    )


def _sweep(given: argparse.Namespace) -> int:
    cells, figures = _run(given, "--over")
    status = max(map(status_of, figures))
    if given.plot is not None:
        draw_swept(given.plot, cells, figures)
    if given.json:
        rows = [
            {"settings": cell.values, "figures": found}
            for cell, found in zip(cells, figures, strict=True)
        ]
        sys.stdout.write(json.dumps(rows) + "\n")
    else:
        from kvtrie.sim.headline import headline

        sys.stdout.write(_table(cells, [headline(found) for found in figures]))
    return status


def _compare(given: argparse.Namespace) -> int:
    from kvtrie.sim.headline import headline, ratios

    cells, figures = _run(given, "--vary")
    status = max(map(status_of, figures))
    heads = [headline(found) for found in figures]
    shares = [ratios(heads[0], head) for head in heads]
    if given.plot is not None:
        draw_compared(given.plot, cells, shares)
    if given.json:
        rows = [
            {"settings": cell.values, "headline": head, "ratios": share, "figures": found}
            for cell, head, share, found in zip(cells, heads, shares, figures, strict=True)
        ]
        sys.stdout.write(json.dumps(rows) + "\n")
    else:
        sys.stdout.write(f"{_table(cells, heads)}\nover the first\n{_table(cells, shares)}")
    return status


def _run(given: argparse.Namespace, option: str) -> tuple[list[Cell], list[dict[str, Any]]]:
    from kvtrie.sim.grid import grid
    from kvtrie.sim.headline import row_of, write_csv
    from kvtrie.sim.sweep import iter_sweep

    cells = grid(given.config, changes_in(given), given.over, option)
    configs = [cell.config for cell in cells]
    coming = iter_sweep(configs, results=given.results)
    found = dict(watched(coming, "Simulating", total=len(cells)))
    figures = [found[at] for at in range(len(cells))]
    if given.csv is not None:
        rows = zip(cells, figures, strict=True)
        write_csv(given.csv, [row_of(cell.values, each) for cell, each in rows])
    return cells, figures


def _table(cells: Sequence[Cell], rows: Sequence[dict[str, float | None]]) -> str:
    """Return a line per run. Columns without any figure are left out."""
    names = [name for name in rows[0] if any(row[name] is not None for row in rows)]
    lines = [[*cells[0].values, *(name.replace("_", " ") for name in names)]]
    for setting, row in zip(labels_of(cells), rows, strict=True):
        figures = (
            "-" if row[name] is None else f"{row[name]:.{_DIGITS.get(name, 3)}f}" for name in names
        )
        lines.append([*setting, *figures])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = (
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )
    return "\n".join(texts) + "\n"


SWEEP = ("play the trace once for each combination of some settings", _sweep_arguments)
COMPARE = ("play the trace with some settings, and show ratios to the first", _compare_arguments)
"""Help texts of the actions, and their functions for arguments."""
