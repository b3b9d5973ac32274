"""Tables of the rows, in text: by mode and trace, means, goals.

Cost: none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from benches.policies.cells import ENGINE
from benches.policies.finds import SECOND
from benches.policies.goals import Figures, goals_of, share_means, short_figures

if TYPE_CHECKING:
    from rich.console import Console

    from benches.policies.cells import Row
    from benches.policies.equal import Share
    from benches.policies.goals import Goal
    from benches.policies.waits import Wait


def show(rows: list[Row], shares: list[Share], times: list[Wait], console: Console) -> None:
    """Print a table per mode, shares of rooms, first-token times, the goals, and the check."""
    tables: list[Table] = []
    for structure in ("leaf-only", "holes", ENGINE, SECOND):
        modes = [(tiers, Figures(rows, structure, tiers)) for tiers in (1, 2)]
        tables += [
            _mode(figures, f"{structure}, tiers {tiers}")
            for tiers, figures in modes
            if figures.policies()
        ]
    if singles := short_figures(rows):
        tables.append(_short(singles))
    for structure in ("leaf-only", ENGINE):
        if means := share_means(shares, structure):
            tables.append(_rooms(means, structure))
    if times:
        tables.append(_times(times))
    if goals := goals_of(rows, shares, times):
        tables.append(_goals(goals))
    if checked := [row for row in rows if row.check is not None]:
        tables.append(_checked(checked))
    for table in tables:
        console.print(table)


def _goals(goals: list[Goal]) -> Table:
    """Goals, and whether each is reached."""
    table = Table(title="goals, per cent")
    for head in ("goal", "at least", "reached", "where", ""):
        table.add_column(head, justify="left" if head in {"goal", "where", ""} else "right")
    for goal in goals:
        verdict = "ok" if goal.ok else "missed"
        table.add_row(goal.what, f"{goal.wanted:.2f}", f"{goal.reached:.2f}", goal.where, verdict)
    return table


def _checked(rows: list[Row]) -> Table:
    """Single blocks of the traces, ours and libcachesim's."""
    table = Table(title="each block as a separate request: hits, per cent")
    for head in ("trace", "blocks", "policy", "kvtrie", "libcachesim"):
        table.add_column(head, justify="right" if head not in {"trace", "policy"} else "left")
    for row in rows:
        pair = (f"{row.hits:.4f}", f"{row.check:.4f}")
        table.add_row(row.trace, str(row.room), row.policy, *pair)
    return table


def _times(times: list[Wait]) -> Table:
    """First-token times: a row per run."""
    table = Table(title="seconds to the first token")
    for head in ("trace", "finds", "load, %", "policy", "mean", "p50", "p90"):
        table.add_column(head)
    for time in times:
        seconds = (f"{each:.3f}" for each in (time.mean, time.p50, time.p90))
        table.add_row(time.trace, time.structure, f"{time.load}", time.policy, *seconds)
    return table


def _rooms(means: dict[str, tuple[float, float]], structure: str) -> Table:
    """Shares of the room of lru: a row per trace."""
    table = Table(title=f"{structure}: share of lru's room at its cost, at its hits")
    for head in ("trace", "cost", "hits"):
        table.add_column(head, justify="left" if head == "trace" else "right")
    for name, (cost, hits) in means.items():
        table.add_row(name, f"{cost:.2f}", f"{hits:.2f}")
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
