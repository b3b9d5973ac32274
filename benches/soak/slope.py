"""Slope: how fast resident memory grows, by least squares over the second half of a soak.

Invariant: what fills up in the first half does not count. Cost: a line through some sixty points.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    from benches.soak.sample import Sample

__all__ = ["MOST", "NOISE", "Slope"]

MOST = 64
"""Bytes per request. A scope that is never freed takes about 300, a session 650."""

NOISE = 2 << 20
"""Bytes by which memory may grow over the half, whatever that is per request."""

_HOUR = 3600


@dataclass(frozen=True)
class Slope:
    """How resident memory grows.

    Attributes:
        requests: requests that the line goes through.
        per_request: bytes per request.
        per_hour: bytes per hour, at the pace of the soak.
    """

    requests: int
    per_request: float
    per_hour: float

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Self:
        """The slope over the second half of the requests of a soak."""
        end = samples[-1].requests
        half = [sample for sample in samples if 2 * sample.requests >= end]
        resident = [float(sample.resident) for sample in half]
        requests = [float(sample.requests) for sample in half]
        return cls(
            requests=end - half[0].requests,
            per_request=_line(requests, resident),
            per_hour=_HOUR * _line([sample.at_s for sample in half], resident),
        )

    @property
    def steady(self) -> bool:
        """Whether it is within the bound."""
        return self.per_request <= MOST or self.per_request * self.requests <= NOISE


def _line(places: Sequence[float], values: Sequence[float]) -> float:
    """The slope of the line of least squares; 0 through a single place."""
    away = np.array(places) - np.mean(places)
    square = float(away @ away)
    return float(away @ np.array(values)) / square if square else 0.0
