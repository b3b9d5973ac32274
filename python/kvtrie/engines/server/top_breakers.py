"""TopBreakers: the parting points at which the most tokens were computed though they recur.

A space-saving sketch: with all entries in use, the smallest one passes its count on to a new point.
Invariant: a point with more tokens than the smallest count is present, and its count is at most the
smallest one too high. Cost: a dict entry per point, and a pass over all of them for a new one when
the sketch is full.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Hashable

__all__ = ["Breaker", "TopBreakers"]

_MOST = 1024


@dataclass(slots=True)
class Breaker:
    """A parting point.

    Attributes:
        tokens: recurring tokens that were computed after it, at most `error` too many.
        error: the count that it took over from another point.
        requests: requests that were counted for it.
        example: the first of them.
    """

    tokens: int
    error: int
    requests: int
    example: dict[str, Any]


class TopBreakers:
    """Parting points by recurring tokens.

    Args:
        most: entries of the sketch.
    """

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._points: dict[Hashable, Breaker] = {}

    def add(self, point: Hashable, tokens: int, example: dict[str, Any]) -> None:
        """Count tokens for a parting point.

        Args:
            point: what identifies the point.
            tokens: recurring tokens that were computed after it.
            example: one request that parted there; kept if the point is new.
        """
        found = self._points.get(point)
        if found is not None:
            found.tokens += tokens
            found.requests += 1
            return
        error = 0
        if len(self._points) >= self._most:
            smallest = min(self._points, key=lambda key: self._points[key].tokens)
            error = self._points.pop(smallest).tokens
        self._points[point] = Breaker(error + tokens, error, 1, example)

    def first(self, count: int) -> list[Breaker]:
        """Return the points with the most tokens, the largest first."""
        ranked = sorted(self._points.values(), key=lambda one: -one.tokens)
        return ranked[:count]
