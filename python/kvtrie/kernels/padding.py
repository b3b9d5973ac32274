"""Padding: from how many queries on torch's causal kernel over a square beats the one under a mask.

Queries that are padded to a square cost more products and need no mask. Where that pays depends on
the device; `python -m benches.selective.padding` measures it into `padding.json`, per kind of
device a list of (rows, least number of queries, or null where padding never paid).
Invariant: a device that nobody measured never pads. Cost: a search among a few points.
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
"""(rows, least number of queries), by rising rows."""


@functools.cache
def stored() -> dict[str, Points]:
    """What was measured, by kind of device."""
    text = files(__package__ or "kvtrie.kernels").joinpath("padding.json").read_text()
    return {name: [(n, q) for n, q in points] for name, points in _read(text).items()}


def _read(text: str) -> dict[str, list[list[int]]]:
    return cast("dict[str, list[list[int]]]", json.loads(text)["points"])


def pays(kind: str, queries: int, rows: int, points: Points | None = None) -> bool:
    """Whether padding so many queries to so many rows is faster on a kind of device.

    Between two numbers of rows that were measured the bound is interpolated, by logarithms; beyond
    the ends the nearest one counts.
    """
    known = stored().get(kind, []) if points is None else points
    if not known:
        return False
    at = bisect_left(known, (rows, 0), key=lambda point: (point[0], 0))
    low, high = known[max(0, at - 1)], known[min(at, len(known) - 1)]
    if low[1] is None or high[1] is None:
        return False
    if low[0] == high[0] or not low[0] < rows < high[0]:
        return queries >= (low if rows <= low[0] else high)[1]
    share = math.log(rows / low[0]) / math.log(high[0] / low[0])
    bound = math.exp((1 - share) * math.log(low[1]) + share * math.log(high[1]))
    return queries >= bound
