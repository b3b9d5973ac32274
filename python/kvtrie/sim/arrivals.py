"""Arrivals: when requests, or conversations, come in; or how many clients wait for answers.

Invariant: the same seed gives the same times everywhere. Cost: a draw each.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtrie.settings.argument import put, real, whole, word

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Arrivals", "thoughts"]

_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Arrivals:
    """The law of the times between arrivals.

    Open ones do not wait for answers. With "closed" ones each of `clients` has one conversation at
    a time: its next turn comes a time to think after the last answer has ended.

    Attributes:
        kind: "poisson": exponential times; "gamma": with the coefficient of variation `cv`, above 1
            for bursts; "fixed": all equal; "closed".
        per_s: how many arrive in a second, in the mean, of open ones.
        cv: standard deviation over mean, of "gamma".
        clients: how many ask, of "closed".
    """

    kind: str = "poisson"
    per_s: float = 1.0
    cv: float = 1.0
    clients: int = 1

    def __post_init__(self) -> None:
        """Check all."""
        put(
            self,
            kind=word("kind", self.kind, ("poisson", "gamma", "fixed", "closed")),
            per_s=real("per_s", self.per_s, 1e-9, 1e9),
            cv=real("cv", self.cv, 1e-3, 1e3),
            clients=whole("clients", self.clients, 1, 2**20),
        )

    @property
    def closed(self) -> bool:
        """Whether they wait for answers."""
        return self.kind == "closed"

    def opened(self, seed: int) -> Iterator[int] | None:
        """As `times`; None if they wait for answers."""
        return None if self.closed else self.times(seed)

    def times(self, seed: int) -> Iterator[int]:
        """Open arrivals in ns, ascending, without end; the first is not at 0 unless drawn so."""
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


def thoughts(mean_s: float, seed: int) -> Iterator[int]:
    """Yield times to think in ns without end, exponential with a mean; 0 for a mean of 0.

    Args:
        mean_s: the mean in seconds.
        seed: of the draws.
    """
    rng = random.Random(seed)  # noqa: S311 - a workload needs no secrecy
    while True:
        yield round(rng.expovariate(1 / mean_s) * _NS) if mean_s else 0
