"""Lookup: reports of a `CacheStore` about chunks and about its hit rates.

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
    """A chunk that is there.

    Attributes:
        chunk: its tokens.
        key: 32 bytes that name it.
        tier: kind of the slowest tier that a part of it must come from.
        tokens: how many of its tokens have KV: all of them.
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
        kind: "absent" if nothing of it is there, "partial" if only its first blocks are.
        tokens: how many of its tokens are there.
    """

    chunk: NDArray[np.int64]
    key: bytes
    kind: Literal["absent", "partial"]
    tokens: int


class Lookup(NamedTuple):
    """The result for the chunks of a text.

    Attributes:
        found: those that are there.
        missed: those that must be computed.
    """

    found: list[Found]
    missed: list[Miss]


@dataclass(frozen=True, slots=True)
class ChunkFeedback:
    """Figures of the store for the choice of the share to recompute.

    Attributes:
        hit_rate: by kind of tier, the share of all full blocks of the chunks looked up by this
            store that was found there, on the fastest of its tiers.
        fetch_ns: by kind of tier, the mean time of a load from there; 0 if there was none.
        bandwidth: by name of lane, the share of the time since the store was made in which the
            executor saw it carry something, for whomever.
        chunks: chunks that were looked up.
        missed: chunks that were not wholly there.
    """

    hit_rate: dict[str, float]
    fetch_ns: dict[str, float]
    bandwidth: dict[str, float]
    chunks: int
    missed: int
