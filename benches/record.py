"""The form of records in `benches/results`; arguments, table and goals that benches share.

A document is `{place, rows}`: where and when it was measured, and a row for each figure of ours
and one peer's. Invariant: every row has the same eight keys; the conditions of the measurement
are under `more`. Cost: none.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from benches import tables
from benches.pages import write_part

if TYPE_CHECKING:
    from collections.abc import Iterable

NO_PEER = "-"
WIDE = 140


@dataclass(frozen=True, slots=True)
class Result:
    """One figure of ours, and a peer's if there is one.

    Attributes:
        what: the row's name.
        ours: our figure; None where ours did not run.
        peer: the peer's; None without one.
        peer_name: which; `-` without one.
        unit: of both.
        ratio: how many times ours is better; None without a peer.
        goal: the ratio that is wanted; None where none is set.
        ok: whether it is reached; None without a goal.
        more: conditions of the measurement: medians, quartiles, sizes.
    """

    what: str
    ours: float | None
    unit: str
    peer: float | None = None
    peer_name: str = NO_PEER
    ratio: float | None = None
    goal: float | None = None
    ok: bool | None = None
    more: dict[str, Any] = field(default_factory=dict[str, Any])


def document(where: dict[str, Any], rows: Iterable[Result]) -> dict[str, Any]:
    """The document: `where` is what `place` gives, and what is common to all rows."""
    return {"place": where, "rows": [asdict(row) for row in rows]}


def read(path: Path) -> tuple[dict[str, Any], list[Result]]:
    """Place and rows of a document; nothing where there is no file."""
    if not path.exists():
        return {}, []
    recorded = json.loads(path.read_text())
    return recorded["place"], [Result(**row) for row in recorded["rows"]]


def write(path: Path, default_out: dict[str, Any]) -> None:
    """Write a document, readable, whole or not at all, and its table in the documentation."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(default_out, indent=1, ensure_ascii=False) + "\n")
    new.replace(path)
    if path.parent == tables.RESULTS and path.stem in tables.TABLES:
        write_part(tables.page(path.stem), path.stem, tables.rendered(path.stem))


def bounded(  # noqa: PLR0917 - the fields of a row
    what: str,
    ours: float,
    peer: float,
    unit: str,
    name: str,
    most: float | None = None,
    **more: Any,
) -> Result:
    """A row whose ours / peer is at most `most`, if that is given.

    Args:
        what: the row's name.
        ours: our figure, of which less is better.
        peer: the peer's.
        unit: of both.
        name: of the peer.
        most: the bound.
        more: see `Result`.
    """
    ratio = round(min(peer / ours, 1e6) if ours else 1e6, 3)
    goal, ok = (None, None) if most is None else (round(1 / most, 3), ours <= most * peer)
    return Result(what, round(ours, 4), unit, round(peer, 4), name, ratio, goal, ok, more)


def options(about: str | None, out: Path | None = None) -> argparse.ArgumentParser:
    """A parser with the arguments that every bench takes.

    Args:
        about: the module's docstring.
        out: where the record is written by default; None if it is only printed.
    """
    parser = argparse.ArgumentParser(description=(about or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small sizes, in seconds; see --out")
    parser.add_argument("--json", action="store_true", help="print the record, no table")
    where = "with --quick: not at all" if out else "not at all"
    shown = f"{out.relative_to(Path(__file__).parents[1])}; " if out else ""
    parser.add_argument("--out", type=Path, help=f"file of the record (default: {shown}{where})")
    parser.set_defaults(default_out=out)
    return parser


def keep(given: argparse.Namespace, record: dict[str, Any]) -> bool:
    """Write a record as `options` said, and print it under `--json`; whether it was printed."""
    path = given.out or (None if given.quick else given.default_out)
    if path is not None:
        write(path, record)
    if given.json:
        sys.stdout.write(json.dumps(record, ensure_ascii=False) + "\n")
    return given.json


def show(rows: Iterable[Result], words: Iterable[str] = ()) -> None:
    """Print a table of rows, and then other lines."""
    console = Console(width=None if sys.stdout.isatty() else WIDE, highlight=False, markup=False)
    table = Table()
    for head in ("what", "ours", "peer", "whose", "ratio", "goal", ""):
        left = head in {"what", "whose"}
        table.add_column(head, justify="left" if left else "right", no_wrap=True)
    for row in rows:
        ratio, goal = ("" if each is None else f"{each:.3g}" for each in (row.ratio, row.goal))
        verdict = "" if row.ok is None else "reached" if row.ok else "missed"
        figures = (
            "" if each is None else f"{each:.4g} {row.unit}" for each in (row.ours, row.peer)
        )
        table.add_row(row.what, *figures, row.peer_name, ratio, goal, verdict)
    console.print(table)
    for each in words:
        console.print(each)
