"""Padding: the smallest number of queries for a padded square to be faster than a mask.

Queries padded to a square cost more products and need no mask in torch's kernel. The break-even
depends on the device. `python -m benches.selective.padding` measures it and writes `padding.json`:
per kind of device a list of (rows, smallest number of queries, or null if padding was never
faster).
Invariant: a device without a measurement never pads. Cost: a search among a few points.
"""

from __future__ import annotations

import functools
import json
import math
from bisect import bisect_left
from importlib.resources import files
from typing import TypeAlias, cast

__all__ = ["Points", "pays", "stored"]

Points: TypeAlias = "list[tuple[int, int | None]]"
"""(rows, smallest number of queries), by ascending rows."""


@functools.cache
def stored() -> dict[str, Points]:
    """Return the measurements, by kind of device."""
    text = files(__package__ or "kvtrie.kernels").joinpath("padding.json").read_text()
    return {name: [(n, q) for n, q in points] for name, points in _read(text).items()}


def _read(text: str) -> dict[str, list[list[int]]]:
    return cast("dict[str, list[list[int]]]", json.loads(text)["points"])


def pays(kind: str, queries: int, rows: int, points: Points | None = None) -> bool:
    """Return whether padding `queries` queries to `rows` rows is faster on a kind of device.

    The bound is interpolated by logarithms between two measured numbers of rows. Below the first
    measurement its bound applies, above the last its ratio of queries to rows.
    """
    measured = stored().get(kind, []) if points is None else points
    if not measured:
        return False
    at = bisect_left(measured, (rows, 0), key=lambda point: (point[0], 0))
    low, few = measured[max(0, at - 1)]
    high, many = measured[min(at, len(measured) - 1)]
    if few is None or many is None:
        return False
    if not low < rows < high:
        return queries >= (few if rows <= low else many * rows / high)
    share = math.log(rows / low) / math.log(high / low)
    return queries >= math.exp((1 - share) * math.log(few) + share * math.log(many))
