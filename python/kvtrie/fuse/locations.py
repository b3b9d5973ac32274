"""Locations: where the blocks of a chunk are, by the chunk's name alone.

A name is a hash and cannot be turned back, so names of chunks that a process has seen are
remembered, and others are looked for among all blocks that there are: each block's label has its
tokens and the key of the block before it, so that paths can be read back, and hashed.
Invariant: what is found is looked up again by its tokens, so that nothing else is ever named.
Cost: a lookup for a name that is remembered; otherwise a hash per token of all blocks, once.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from numpy.typing import NDArray

    from kvtrie import Index

__all__ = ["Location", "Names", "paths"]

_MOST = 1 << 14
_STANDING = struct.Struct("<QQIIBB6x")
_HEAD = struct.Struct("<BBxxII32s")
_COST_BYTES = 8


class Location(NamedTuple):
    """Where some layers of a block of a chunk are.

    Attributes:
        block: index of the block, from 0 for the one with the chunk's first token.
        tier: kind of the tier.
        slots: its slot there, or with layer slots one for each of the layers.
        layers: first layer, and one behind the last.
    """

    block: int
    tier: str
    slots: tuple[int, ...]
    layers: tuple[int, int]


class Names:
    """The chunks that were seen last, by their names."""

    def __init__(self) -> None:
        self._seen: OrderedDict[bytes, NDArray[np.uint32]] = OrderedDict()

    def saw(self, key: bytes, tokens: NDArray[np.int64]) -> None:
        """A chunk has this name."""
        if key in self._seen:
            self._seen.move_to_end(key)
            return
        self._seen[key] = tokens.astype(np.uint32)
        if len(self._seen) > _MOST:
            self._seen.popitem(last=False)

    def get(self, key: bytes) -> NDArray[np.int64] | None:
        """The tokens of a chunk, if it is remembered."""
        seen = self._seen.get(key)
        return None if seen is None else seen.astype(np.int64)


def paths(indices: Iterable[Index]) -> Iterator[NDArray[np.int64]]:
    """The token sequences that blocks make, each to the end of a block behind which none is known.

    Args:
        indices: what `BlockManager.index` gives of tiers.
    """
    blocks: dict[bytes, tuple[bytes, bytes]] = {}
    for index in indices:
        for key, (label, *_) in zip(index.key, index, strict=True):
            blocks[key.tobytes()] = _record(label)
    above = {parent for parent, _ in blocks.values()}
    for key in blocks:
        if key not in above:
            yield _path(blocks, key)


def _path(blocks: Mapping[bytes, tuple[bytes, bytes]], key: bytes) -> NDArray[np.int64]:
    parts: list[bytes] = []
    while key in blocks:
        key, tokens = blocks[key]
        parts.append(tokens)
    return np.frombuffer(b"".join(reversed(parts)), dtype="<u4").astype(np.int64)


def _record(label: bytes) -> tuple[bytes, bytes]:
    """The key of the block before, and the tokens, of a block's label.

    The label is as the core writes it: how the block was used, 32 bytes and perhaps a cost, then
    its record: version, scope, digests, tokens, the key before it.
    """
    priced = _STANDING.unpack_from(label)[5]
    begin = _STANDING.size + (_COST_BYTES if priced else 0)
    _, _, _, tokens, parent = _HEAD.unpack_from(label, begin)
    first = begin + _HEAD.size
    return parent, label[first : first + 4 * tokens]
