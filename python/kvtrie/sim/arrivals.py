"""Arrival times of requests or conversations, or the number of clients in a closed loop.

Invariant: the same seed gives the same times everywhere. Cost: a draw each.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtrie.settings.argument import put, real, whole, word

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Arrivals", "think_times"]

_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Distribution of the times between arrivals.

    Open arrivals do not wait for answers. With "closed", each of `clients` plays a conversation at
    a time: its next turn arrives a think time after the end of the last answer.

    Attributes:
        kind: "poisson" (exponential times), "gamma" (with the coefficient of variation `cv`, above
            1 for bursts), "fixed" (equal times) or "closed".
        per_s: mean number of open arrivals per second.
        cv: standard deviation over mean, for "gamma".
        clients: number of clients, for "closed".
    """

    kind: str = "poisson"
    per_s: float = 1.0
    cv: float = 1.0
    clients: int = 1

    def __post_init__(self) -> None:
        """Check the settings."""
        put(
            self,
            kind=word("kind", self.kind, ("poisson", "gamma", "fixed", "closed")),
            per_s=real("per_s", self.per_s, 1e-9, 1e9),
            cv=real("cv", self.cv, 1e-3, 1e3),
            clients=whole("clients", self.clients, 1, 2**20),
        )

    @property
    def closed(self) -> bool:
        """Whether arrivals wait for answers."""
        return self.kind == "closed"

    def opened(self, seed: int) -> Iterator[int] | None:
        """Return `times`, or None for closed arrivals."""
        return None if self.closed else self.times(seed)

    def times(self, seed: int) -> Iterator[int]:
        """Yield ascending arrival times in ns without end. The first is not 0 unless drawn so."""
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


def think_times(mean_s: float, seed: int) -> Iterator[int]:
    """Yield exponential think times in ns without end, or 0 for a mean of 0.

    Args:
        mean_s: mean in seconds.
        seed: seed of the draws.
    """
    rng = random.Random(seed)  # noqa: S311 - a workload needs no secrecy
    while True:
        yield round(rng.expovariate(1 / mean_s) * _NS) if mean_s else 0
