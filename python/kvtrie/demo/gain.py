"""Gain of the returning turns of a demo: first tokens with kvtrie and without, by tier.

A turn counts under the slowest tier with reused tokens, because its first token waits for that
tier. Invariant: each returning turn counts once. Cost: a pass over the turns.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtrie.demo.turn import Turn

__all__ = ["Gain", "gain_table", "gains"]


@dataclass(frozen=True, slots=True)
class Gain:
    """Gain of some returning turns.

    Attributes:
        source: slowest tier with reused tokens, "nothing", or "all".
        turns: number of turns.
        first_s: median seconds to the first token with kvtrie.
        uncached_s: median seconds to the first token without kvtrie.
        reused: share of prompt tokens not computed, from 0 to 1.
    """

    source: str
    turns: int
    first_s: float
    uncached_s: float
    reused: float


def gains(turns: Sequence[Turn], tiers: Sequence[str]) -> list[Gain]:
    """Return the gain per tier, then over all returning turns.

    Args:
        turns: all turns of a run. The first turn of a conversation is not returning.
        tiers: kinds of the tiers, fastest first.
    """
    returning = [turn for turn in turns if turn.turn > 1]
    by_source: dict[str, list[Turn]] = {name: [] for name in (*tiers, "nothing")}
    for turn in returning:
        used = [name for name, tokens in zip(tiers, turn.reused, strict=True) if tokens]
        by_source[used[-1] if used else "nothing"].append(turn)
    rows = [*by_source.items(), ("all", returning)]
    return [_gain(source, some) for source, some in rows if some]


def _gain(source: str, turns: Sequence[Turn]) -> Gain:
    reused = sum(sum(turn.reused) for turn in turns) / sum(turn.prompt for turn in turns)
    first, uncached = (
        median(getattr(turn, name) for turn in turns) for name in ("first_s", "uncached_s")
    )
    return Gain(source, len(turns), first, uncached, reused)


def gain_table(found: Sequence[Gain], *, timed: bool) -> Table:
    """Return the gains as a table, with times if `timed`."""
    table = Table(title="Returning turns", title_justify="left", title_style="bold")
    for name in ("loaded from", "turns", "prompt tokens not computed"):
        table.add_column(name, justify="left" if name == "loaded from" else "right")
    for name in ("first token, ms", "without kvtrie", "times sooner") if timed else ():
        table.add_column(name, justify="right")
    for row in found:
        times = (
            f"{1e3 * row.first_s:,.0f}",
            f"{1e3 * row.uncached_s:,.0f}",
            f"{row.uncached_s / row.first_s:.1f}",
        )
        name = "all returning turns" if row.source == "all" else row.source
        table.add_row(name, f"{row.turns}", f"{row.reused:.0%}", *(times if timed else ()))
    return table
