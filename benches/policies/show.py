"""Tables of the rows, in text: by mode and trace, means, goals.

Cost: none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from benches.policies.cells import ENGINE
from benches.policies.goals import Figures, goals_of, short_figures

if TYPE_CHECKING:
    from rich.console import Console

    from benches.policies.cells import Row


def show(rows: list[Row], console: Console) -> None:
    """Print a table per mode, the goals, and the check."""
    for structure in ("leaf-only", "holes", ENGINE):
        for tiers in (1, 2):
            figures = Figures(rows, structure, tiers)
            if figures.policies():
                console.print(_mode(figures, f"{structure}, tiers {tiers}"))
    singles = short_figures(rows)
    if singles:
        console.print(_short(singles))
    goals = goals_of(rows)
    if goals:
        table = Table(title="goals, per cent")
        for head in ("goal", "at least", "reached", "where", ""):
            table.add_column(head, justify="left" if head in {"goal", "where", ""} else "right")
        for goal in goals:
            verdict = "ok" if goal.ok else "missed"
            reached = f"{goal.reached:.2f}"
            table.add_row(goal.what, f"{goal.wanted:.2f}", reached, goal.where, verdict)
        console.print(table)
    checked = [row for row in rows if row.check is not None]
    if checked:
        console.print(_checked(checked))


def _checked(rows: list[Row]) -> Table:
    """Single blocks of the traces, ours and libcachesim's."""
    table = Table(title="each block as a separate request: hits, per cent")
    for head in ("trace", "blocks", "policy", "kvtrie", "libcachesim"):
        table.add_column(head, justify="right" if head not in {"trace", "policy"} else "left")
    for row in rows:
        pair = (f"{row.hits:.4f}", f"{row.check:.4f}")
        table.add_row(row.trace, str(row.room), row.policy, *pair)
    return table


def _short(figures: dict[tuple[str, int], dict[str, float]]) -> Table:
    """Streams of single blocks: a row per stream and room, a column per policy."""
    table = Table(title="short prompts, one block each: hits, per cent, means over the seeds")
    names = list(next(iter(figures.values())))
    table.add_column("stream, room")
    for name in names:
        table.add_column(name, justify="right")
    for (stream, room), hits in figures.items():
        table.add_row(f"{stream}, {room}", *(f"{hits[name]:.1f}" for name in names))
    return table


def _mode(figures: Figures, title: str) -> Table:
    """One mode: a row per trace and room, a column per policy."""
    table = Table(title=f"{title}: cost saved / blocks found, per cent, means over the seeds")
    names = figures.policies()
    table.add_column("trace, room")
    for name in names:
        table.add_column(name, justify="right")
    keys = list(dict.fromkeys(key for name in names for key in figures.keys(name)))
    for key in keys:
        cells = [
            "{:.1f} / {:.1f}".format(*figures.cell(name, key)) if key in figures.keys(name) else "–"
            for name in names
        ]
        table.add_row(f"{key[0]}, {key[1]}", *cells)
    means = [
        "{:.1f} / {:.1f}".format(*figures.mean(name))
        if {key[0] for key in figures.keys(name)} == {key[0] for key in keys}
        else "–"
        for name in names
    ]
    table.add_row("mean of the traces", *means)
    return table
