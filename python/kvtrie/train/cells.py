"""Cells: how layers and steps are tiled.

A row of cells covers some neighbouring layers, a column some neighbouring steps.
Invariant: every layer and every step is in exactly one row and one column, in order.
Cost: a comparison per step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtrie.train.settings import GradientSettings

__all__ = ["columns", "rows"]


def rows(layers: int, settings: GradientSettings) -> list[range]:
    """The layers of each row of cells, from the bottom."""
    each = settings.layers_per_cell
    return [range(lo, min(layers, lo + each)) for lo in range(0, layers, each)]


def columns(steps: Sequence[int], cache_length: int, settings: GradientSettings) -> list[range]:
    """The steps of each cell, from the left.

    Args:
        steps: tokens of each step.
        cache_length: rows of the cache; the fewest where layers differ.
        settings: with the multiplier.
    """
    most = int(cache_length * settings.chunks_per_cell_multiplier)
    found: list[range] = []
    start = length = 0
    for at, step in enumerate(steps):
        if at > start and length + step > most:
            found.append(range(start, at))
            start, length = at, 0
        length += step
    return [*found, range(start, len(steps))]
