"""Report: the summary as a table for people, and beside it the goals.

Cost: none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from benches.eval_fusion.summary import MEAN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benches.eval_fusion.summary import Figure, Line


LEGEND = """\
mean of kinds and each kind: recovered, 1 - KL / KL of plain reuse, with 95 % intervals
exact, tokens: answers, and their tokens, whose best token is the full prefill's
cost, computed: CPU time, of the full prefill's; share of all chunks' tokens and layers
rank: correlation of the monitor's score with -KL"""
"""What the columns are."""


def table_of(lines: Sequence[Line], kinds: Sequence[str], title: str) -> Table:
    """A row per selection; recovered with its interval for the mean of kinds and each kind."""
    table = Table(title=title, box=None, pad_edge=False)
    table.add_column("selection")
    for name in (
        "ratio",
        "layers",
        MEAN,
        *kinds,
        "KL",
        "exact",
        "tokens",
        "cost",
        "computed",
        "rank",
    ):
        table.add_column(name, justify="right")
    for line in lines:
        told = [_told(line.recovered.get(kind)) for kind in (MEAN, *kinds)]
        table.add_row(
            line.row.name,
            _short(line.row.ratio),
            line.setting.layers,
            *told,
            f"{line.kl:.4f}",
            _short(line.exact),
            _short(line.same),
            _short(line.cost),
            _short(line.computed),
            "" if line.rank is None else _short(line.rank),
        )
    return table


def goals_of(lines: Sequence[Line]) -> list[str]:
    """A line per row that has goals, for the lower ends of intervals."""
    told: list[str] = []
    for line in lines:
        words = [
            f"{kind} ≥ {_short(line.row.goals[kind])} {'missed' if missed else 'reached'}"
            for kind, missed in line.missed().items()
        ]
        if words:
            told.append(f"goals of {line.row.name} {_short(line.row.ratio)}: {', '.join(words)}")
    return told


def _told(figure: Figure | None) -> str:
    if figure is None:
        return ""
    return f"{_short(figure.value)} [{_short(figure.low)}, {_short(figure.high)}]"


def _short(number: float) -> str:
    """Two digits behind the point, and none before it that says nothing."""
    return f"{number:.2f}".replace("0.", ".", 1) if abs(number) < 1 else f"{number:.2f}"
