"""Grids of test cases: the few cells that `make test` runs of each."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["covering"]


def covering(cells: Sequence[Mapping[str, object]]) -> set[int]:
    """Return the numbers of few cells that have each value of each parameter.

    Each next cell has the most values not yet covered, and is the first of those.

    Args:
        cells: the parameters of each cell by name. Values with equal `repr` are equal.
    """
    values = [{(name, repr(value)) for name, value in cell.items()} for cell in cells]
    left: set[tuple[str, str]] = set().union(*values)
    chosen: set[int] = set()
    while left:
        most = max(range(len(cells)), key=lambda at: len(values[at] & left))
        left -= values[most]
        chosen.add(most)
    return chosen
