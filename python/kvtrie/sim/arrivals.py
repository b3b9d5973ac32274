"""Arrivals: when requests, or conversations, come in.

Invariant: the same seed gives the same times everywhere. Cost: a draw each.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtrie.argument import put, real, word

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Arrivals"]

_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Arrivals:
    """The law of the times between arrivals.

    Attributes:
        kind: "poisson": exponential times; "gamma": with the coefficient of variation `cv`, above 1
            for bursts; "fixed": all equal.
        per_s: how many arrive in a second, in the mean.
        cv: standard deviation over mean, of "gamma".
    """

    kind: str = "poisson"
    per_s: float = 1.0
    cv: float = 1.0

    def __post_init__(self) -> None:
        """Check all."""
        put(
            self,
            kind=word("kind", self.kind, ("poisson", "gamma", "fixed")),
            per_s=real("per_s", self.per_s, 1e-9, 1e9),
            cv=real("cv", self.cv, 1e-3, 1e3),
        )

    def times(self, seed: int) -> Iterator[int]:
        """Arrivals in ns, ascending, without end; the first is not at 0 unless drawn so."""
        rng = random.Random(seed)  # noqa: S311 - a workload needs no secrecy
        shape = self.cv**-2
        at = 0.0
        while True:
            if self.kind == "poisson":
                at += rng.expovariate(self.per_s)
            elif self.kind == "gamma":
                at += rng.gammavariate(shape, 1 / (shape * self.per_s))
            else:
                at += 1 / self.per_s
            yield round(at * _NS)
