"""Rows out of lines: best and median over the rounds, the ratio, the goal; and their table.

Invariant: nothing is reported of a trace that was played wrongly: every LRU manager that plays the
common trace must have found the share of it that LRU finds. Cost: none.
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from rich.table import Table

from benches.core.goals import GOALS
from benches.core.rows import OURS
from benches.record import NO_PEER, Result
from benches.workload import LRU_POOL, LRU_SHARE, LRU_WITHIN, SEED

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from benches.core.referee import Line
    from benches.core.rows import Game, Row

NOT_LRU = ("learned", "retention", "arc")  # policies of drivers that play the common trace


class PlayedWronglyError(Exception):
    """A manager that did not find what it must have found."""


def check(lines: Iterable[Line]) -> list[str]:
    """A line on each LRU manager's hit share.

    Raises:
        PlayedWronglyError: one found another share.
    """
    notes: list[str] = []
    for line in lines:
        about = line.context
        if line.what not in {"request", "request.lru", "offload"} or "hit_rate" not in about:
            continue
        if about.get("policy", "lru") in NOT_LRU:
            continue
        if (about["blocks"], about["seed"]) != (LRU_POOL, SEED):
            continue
        words = (
            f"{line.peer} finds {100 * about['hit_rate']:.2f} % of the prompt blocks ({line.what})"
        )
        if abs(about["hit_rate"] - LRU_SHARE) > LRU_WITHIN:
            lies = f"{100 * LRU_SHARE:.1f} % ± {100 * LRU_WITHIN:.1f}"
            raise PlayedWronglyError(
                f"{words}; LRU finds {lies} of them with room for {LRU_POOL} blocks, so it plays "
                "another trace or plays it wrongly: nothing is reported"
            )
        notes.append(words)
    return list(dict.fromkeys(notes))


def rows_of(games: Iterable[Game], lines: Sequence[Line]) -> list[Result]:
    """Compare every row of the games with every peer that has it."""
    values: dict[tuple[str, str], list[float]] = {}
    for line in lines:
        values.setdefault((line.peer, line.what), []).append(line.value)
    others = [peer for peer, _ in values if peer != OURS]
    rows: list[Result] = []
    for game in games:
        for row in game.rows:
            named = [peer for peer in dict.fromkeys(others) if (peer, theirs(row)) in values]
            named += [row.also] if (OURS, row.also) in values else []
            rows += [result(game, row, values, peer) for peer in named or [NO_PEER]]
    return rows


def theirs(row: Row) -> str:
    """The row's name in the peers' lines."""
    return row.peer or row.what


def of(values: dict[tuple[str, str], list[float]], peer: str, row: Row) -> list[float]:
    """Return one side's values for a row, less those of the part that is subtracted."""
    found = values.get((peer, row.what), [])
    if row.less is None:
        return found
    lower = values.get((peer, row.less), [])
    return [one - other for one, other in zip(found, lower, strict=False)]


def result(game: Game, row: Row, values: dict[tuple[str, str], list[float]], name: str) -> Result:
    """Compare one row with one peer, with medians and rounds as `more`."""
    ours = of(values, OURS, row)
    peer = values.get((OURS, name) if name == row.also else (name, theirs(row)), [])
    best, best_peer = lowest(ours), lowest(peer)
    ratio = None if best is None or best_peer is None or best <= 0 else best_peer / best
    goal = GOALS.get(row.what, {}).get(name)
    return Result(
        what=row.what,
        ours=best,
        unit=row.unit,
        peer=best_peer,
        peer_name=name,
        ratio=None if ratio is None else round(ratio, 3),
        goal=goal,
        ok=None if ratio is None or goal is None else ratio >= goal,
        more={
            "game": game.name,
            "label": row.label,
            "ours_median": None if best is None else round(median(ours), 4),
            "peer_median": None if best_peer is None else round(median(peer), 4),
            "rounds": len(ours),
        },
    )


def lowest(values: list[float]) -> float | None:
    """The best of the rounds."""
    return round(min(values), 4) if values else None


def table(rows: Sequence[Result]) -> Table:
    """Return the table for people: best, and median in brackets."""
    shown = Table(title="ours and the peers: best (median) of the rounds, less is better")
    for head in ("what", "ours", "peer's", "peer", "peer / ours", "goal", ""):
        left = head in {"what", "peer"}
        shown.add_column(head, justify="left" if left else "right", no_wrap=True)
    label = ""
    for row in rows:
        first = row.more["label"] != label
        label = row.more["label"]
        cells = (
            label if first else "",
            figure(row.ours, row.more["ours_median"], row.unit) if first else "",
            figure(row.peer, row.more["peer_median"], row.unit),
            row.peer_name,
            "-" if row.ratio is None else f"{row.ratio:.3g}",
            "-" if row.goal is None else short(row.goal),
            "" if row.ok is None else ("[green]ok[/]" if row.ok else "[red]missed[/]"),
        )
        shown.add_row(*cells)
    return shown


def figure(best: float | None, middle: float | None, unit: str) -> str:
    """Best and median."""
    if best is None or middle is None:
        return "-"
    return f"{short(best)} ({short(middle)}) {unit}"


def short(value: float) -> str:
    """Three digits, and no exponent."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
