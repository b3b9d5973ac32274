"""Lookup: results of a `CacheStore` for chunks, and its hit and load figures.

Invariant: plain values; nothing here is held or moved. Cost: none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["ChunkFeedback", "Found", "Lookup", "Miss"]


class Found(NamedTuple):
    """A chunk whose KV is cached completely.

    Attributes:
        chunk: its tokens.
        key: 32 bytes that name it.
        tier: kind of the slowest tier that a part of it must come from.
        tokens: number of its tokens: all have KV.
    """

    chunk: NDArray[np.int64]
    key: bytes
    tier: str
    tokens: int


class Miss(NamedTuple):
    """A chunk that must be computed.

    Attributes:
        chunk: its tokens.
        key: 32 bytes that name it.
        kind: "absent" if none of its KV is cached, "partial" if that of its first blocks is.
        tokens: number of its tokens that have KV.
    """

    chunk: NDArray[np.int64]
    key: bytes
    kind: Literal["absent", "partial"]
    tokens: int


class Lookup(NamedTuple):
    """Chunks of a text that were found, and those that were not.

    Attributes:
        found: those that are there.
        missed: those that must be computed.
    """

    found: list[Found]
    missed: list[Miss]


@dataclass(frozen=True, slots=True)
class ChunkFeedback:
    """Hit and load figures of a store, from which a controller chooses the ratio.

    Attributes:
        hit_rate: by kind of tier, the share of all full blocks of the chunks looked up by this
            store that was found there, on the fastest of its tiers.
        fetch_ns: by kind of tier, the mean time of a load from there; 0 if there was none.
        bandwidth: by name of lane, the share of the time since the store was made in which the
            executor saw it carry something, for any client.
        chunks: chunks that were looked up.
        missed: chunks whose KV was not cached completely.
    """

    hit_rate: dict[str, float]
    fetch_ns: dict[str, float]
    bandwidth: dict[str, float]
    chunks: int
    missed: int
