"""Family: a source of requests from a family of traces.

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
    """Settings of a family of requests.

    Attributes:
        name: name of the family.
        requests: number of requests.
    """

    name: str
    requests: int = 1000

    def __post_init__(self) -> None:
        """Check the settings."""
        put(
            self,
            name=word("name", self.name, tuple(FAMILIES)),
            requests=whole("requests", self.requests, 1, 2**31 - 1),
        )

    def made(self, seed: int) -> Iterator[TraceRequest]:
        """Yield the requests in time order."""
        return iter(FAMILIES[self.name](requests=self.requests, seed=seed))
