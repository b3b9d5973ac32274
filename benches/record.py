"""The form in which measurements are kept in `benches/results`, and what reads and writes it.

A document is `{place, rows}`: where and when it was measured, and a row for each figure of ours
beside one peer's. Invariant: every row has the same eight keys; what else tells how it was made
stands under `more`. Cost: none.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

NO_PEER = "-"


@dataclass(frozen=True, slots=True)
class Result:
    """One figure of ours, beside a peer's where there is one.

    Attributes:
        what: the row's name.
        ours: our figure; None where ours did not run.
        peer: the peer's; None without one.
        peer_name: which; `-` without one.
        unit: of both.
        ratio: how many times ours is better; None without a peer.
        goal: the ratio that is wanted; None where none is set.
        ok: whether it is reached; None without a goal.
        more: what else tells how it was made: medians, quartiles, sizes.
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
    known = json.loads(path.read_text())
    return known["place"], [Result(**row) for row in known["rows"]]


def write(path: Path, kept: dict[str, Any]) -> None:
    """Write a document, readable, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
    new.replace(path)
