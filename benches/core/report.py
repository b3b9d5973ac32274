"""Rows out of lines: best and median over the rounds, the ratio, the goal; table and document.

Invariant: nothing is reported of a trace that was played wrongly: every LRU manager that plays the
common trace must have found the share of it that LRU finds. Cost: none.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from rich.table import Table

from benches.core.rows import LIMIT, OURS
from benches.workload import LRU_POOL, LRU_SHARE, LRU_WITHIN, SEED

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from benches.core.referee import Line
    from benches.core.rows import Game, Row

NOT_LRU = ("retention", "arc")  # policies of drivers that play the common trace


class PlayedWronglyError(Exception):
    """A manager that did not find what it must have found."""


@dataclass(frozen=True, slots=True)
class Reported:
    """One row: ours beside one peer.

    Attributes:
        what: the row's name.
        label: what people read.
        ours: best of the rounds; None where ours did not run.
        ours_median: median of the rounds.
        peer: best of the peer's rounds; None without a peer.
        peer_median: median of them.
        peer_name: which; `-` without one.
        unit: of all figures.
        ratio: peer / ours, both the best.
        goal: at most so much; None where none is set.
        ok: whether ours reaches the goal with its best; None without one.
        limit: the prototype's best; None where it did not run.
        rounds: of ours.
    """

    what: str
    label: str
    ours: float | None
    ours_median: float | None
    peer: float | None
    peer_median: float | None
    peer_name: str
    unit: str
    ratio: float | None
    goal: float | None
    ok: bool | None
    limit: float | None
    rounds: int


def check(lines: Iterable[Line]) -> list[str]:
    """A line on each LRU manager's hit share.

    Raises:
        PlayedWronglyError: one found another share.
    """
    said: list[str] = []
    for line in lines:
        told = line.context
        if line.what not in {"request", "request.lru", "offload"} or "hit_rate" not in told:
            continue
        if told.get("policy", "lru") in NOT_LRU:
            continue
        if (told["blocks"], told["seed"]) != (LRU_POOL, SEED):
            continue
        words = (
            f"{line.peer} finds {100 * told['hit_rate']:.2f} % of the prompt blocks ({line.what})"
        )
        if abs(told["hit_rate"] - LRU_SHARE) > LRU_WITHIN:
            lies = f"{100 * LRU_SHARE:.1f} % ± {100 * LRU_WITHIN:.1f}"
            raise PlayedWronglyError(
                f"{words}; LRU finds {lies} of them with room for {LRU_POOL} blocks, so it plays "
                "another trace or plays it wrongly: nothing is reported"
            )
        said.append(words)
    return list(dict.fromkeys(said))


def rows_of(games: Iterable[Game], lines: Sequence[Line]) -> list[Reported]:
    """Every row of the games beside every peer that has it."""
    values: dict[tuple[str, str], list[float]] = {}
    for line in lines:
        values.setdefault((line.peer, line.what), []).append(line.value)
    others = [peer for peer, _ in values if peer not in {OURS, LIMIT}]
    rows: list[Reported] = []
    for game in games:
        for row in game.rows:
            ours, limit = of(values, OURS, row), of(values, LIMIT, row)
            named = [peer for peer in dict.fromkeys(others) if (peer, theirs(row)) in values]
            rows += [reported(row, ours, values[peer, theirs(row)], peer, limit) for peer in named]
            if not named:
                rows.append(reported(row, ours, [], "-", limit))
    return rows


def theirs(row: Row) -> str:
    """The row's name in the peers' lines."""
    return row.peer or row.what


def of(values: dict[tuple[str, str], list[float]], peer: str, row: Row) -> list[float]:
    """What one side measured for a row, less what is taken away."""
    found = values.get((peer, row.what), [])
    if row.less is None:
        return found
    lower = values.get((peer, row.less), [])
    return [one - other for one, other in zip(found, lower, strict=False)]


def reported(
    row: Row, ours: list[float], peer: list[float], name: str, limit: list[float]
) -> Reported:
    """One row."""
    best, best_peer = lowest(ours), lowest(peer)
    ratio = None if best is None or best_peer is None or best <= 0 else best_peer / best
    return Reported(
        what=row.what,
        label=row.label,
        ours=best,
        ours_median=None if best is None else round(median(ours), 4),
        peer=best_peer,
        peer_median=None if best_peer is None else round(median(peer), 4),
        peer_name=name,
        unit=row.unit,
        ratio=None if ratio is None else round(ratio, 3),
        goal=row.goal,
        ok=None if best is None or row.goal is None else best <= row.goal,
        limit=lowest(limit),
        rounds=len(ours),
    )


def lowest(values: list[float]) -> float | None:
    """The best of the rounds."""
    return round(min(values), 4) if values else None


def table(rows: Sequence[Reported]) -> Table:
    """What people read: best, and median in brackets."""
    limited = any(row.limit is not None for row in rows)
    shown = Table(title="ours and the peers: best (median) of the rounds, less is better")
    for head in ("what", "ours", "peer's", "peer", "peer / ours", "goal", ""):
        left = head in {"what", "peer"}
        shown.add_column(head, justify="left" if left else "right", no_wrap=True)
    if limited:
        shown.add_column("limit", justify="right")
    label = ""
    for row in rows:
        first = row.label != label
        label = row.label
        cells = (
            row.label if first else "",
            figure(row.ours, row.ours_median, row.unit) if first else "",
            figure(row.peer, row.peer_median, row.unit),
            row.peer_name,
            "-" if row.ratio is None else f"{row.ratio:.3g}",
            "-" if row.goal is None else f"{row.goal:g} {row.unit}",
            "" if row.ok is None else ("[green]ok[/]" if row.ok else "[red]missed[/]"),
        )
        last = ("-" if row.limit is None else f"{row.limit:.3g}",) if limited else ()
        shown.add_row(*cells, *last)
    return shown


def figure(best: float | None, middle: float | None, unit: str) -> str:
    """Best and median."""
    if best is None or middle is None:
        return "-"
    return f"{short(best)} ({short(middle)}) {unit}"


def short(value: float) -> str:
    """Three digits, and no exponent."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
