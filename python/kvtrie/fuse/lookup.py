"""Lookup: results of a `CacheStore` for chunks, and its hit and load figures.

Invariant: plain values, without leases. Cost: none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["ChunkFeedback", "Found", "Lookup", "Miss"]


class Found(NamedTuple):
    """A completely cached chunk.

    Attributes:
        chunk: its tokens.
        key: its name, 32 bytes.
        tier: kind of the slowest tier needed to load it.
        tokens: number of its tokens, all with KV.
    """

    chunk: NDArray[np.int64]
    key: bytes
    tier: str
    tokens: int


class Miss(NamedTuple):
    """A chunk to compute.

    Attributes:
        chunk: its tokens.
        key: its name, 32 bytes.
        kind: "absent" without cached KV, "partial" if its first blocks are cached.
        tokens: number of its tokens with cached KV.
    """

    chunk: NDArray[np.int64]
    key: bytes
    kind: Literal["absent", "partial"]
    tokens: int


class Lookup(NamedTuple):
    """Found and missed chunks of a text.

    Attributes:
        found: completely cached chunks.
        missed: chunks to compute.
    """

    found: list[Found]
    missed: list[Miss]


@dataclass(frozen=True, slots=True)
class ChunkFeedback:
    """Hit and load figures of a store, from which a controller chooses the ratio.

    Attributes:
        hit_rate: by kind of tier, its share of all full blocks looked up by this store. A block
            counts for its fastest tier.
        fetch_ns: by kind of tier, the mean time of a load, 0 without loads.
        bandwidth: by name of lane, its busy share of the time since the store was created, for all
            clients of the executor.
        chunks: number of chunks looked up.
        missed: number of chunks not cached completely.
    """

    hit_rate: dict[str, float]
    fetch_ns: dict[str, float]
    bandwidth: dict[str, float]
    chunks: int
    missed: int
