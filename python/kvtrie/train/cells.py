"""Cells: tiles of layers and steps.

A row of cells covers some adjacent layers, a column some adjacent steps.
Invariant: every layer is in exactly one row and every step in exactly one column, in order.
Cost: a comparison per step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtrie.train.settings import GradientSettings

__all__ = ["columns", "rows"]


def rows(layers: int, settings: GradientSettings) -> list[range]:
    """Return the layers of each row of cells, from the bottom."""
    each = settings.layers_per_cell
    return [range(lo, min(layers, lo + each)) for lo in range(0, layers, each)]


def columns(steps: Sequence[int], cache_length: int, settings: GradientSettings) -> list[range]:
    """Return the steps of each column of cells, from the left.

    Args:
        steps: tokens of each step.
        cache_length: rows of the cache, the smallest number of all layers.
        settings: settings with the multiplier.
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
