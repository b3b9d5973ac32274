"""TopBreakers: the divergence points with the most recurring tokens computed after them.

A space-saving sketch: if all entries are in use, a new point replaces the smallest entry and
inherits its count. Invariant: a point with more tokens than the smallest count is present, and its
count is too high by at most the smallest count. Cost: a dict entry per point. If the sketch is
full, a new point costs a pass over all entries.
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
    """A divergence point.

    Attributes:
        tokens: recurring tokens computed after it, at most `error` too many.
        error: the count inherited from a replaced point.
        requests: number of requests counted for it.
        example: the first of these requests.
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
        """Count tokens for a divergence point.

        Args:
            point: the identity of the point.
            tokens: recurring tokens computed after it.
            example: a request that diverged there, kept if the point is new.
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
