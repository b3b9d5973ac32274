"""Family: one of the families as a source of requests.

Invariant: block ids are of 512 tokens. Cost: all requests are held.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtrie.settings.argument import put, whole, word
from kvtrie.sim.workloads.families import FAMILIES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvtrie.sim.trace import TraceRequest

__all__ = ["Family"]


@dataclass(frozen=True, slots=True)
class Family:
    """Number of requests of a family.

    Attributes:
        name: of the family.
        requests: how many.
    """

    name: str
    requests: int = 1000

    def __post_init__(self) -> None:
        """Check all."""
        put(
            self,
            name=word("name", self.name, tuple(FAMILIES)),
            requests=whole("requests", self.requests, 1, 2**31 - 1),
        )

    def made(self, seed: int) -> Iterator[TraceRequest]:
        """Yield the requests, in order of time."""
        return iter(FAMILIES[self.name](requests=self.requests, seed=seed))
