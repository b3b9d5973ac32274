"""Names: the stored sequence of a chunk, its name, and the lookup of a chunk by name.

A name is a hash of everything a match depends on. It cannot be inverted, so a process remembers the
names it has seen and searches all blocks for an unknown name. The label of a block has its tokens
and the key of the previous block, so paths can be read back and hashed.
Invariant: two names are equal exactly if model, tenant, adapter, prefix, tokens and digests are.
Cost: a lookup for a remembered name, otherwise a hash per token of all blocks.
"""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from numpy.typing import NDArray

    from kvtrie import Index
    from kvtrie.settings.scope import Scope

__all__ = ["FILLER", "Location", "Names", "paths"]

FILLER = 0
"""Token to fill the last block of a chunk."""

_LABEL = b"chunk"
_MOST = 1 << 14
_USAGE = struct.Struct("<QQIIBB6x")
_HEAD = struct.Struct("<BBxxII32s")
_COST_BYTES = 8


class Location(NamedTuple):
    """A copy of some layers of a chunk's block.

    Attributes:
        block: index of the block, from 0 for the block of the chunk's first token.
        tier: kind of the tier.
        slots: its slot there, or a slot per layer on a tier with layer slots.
        layers: first layer, and the end, exclusive.
    """

    block: int
    tier: str
    slots: tuple[int, ...]
    layers: tuple[int, int]


class Names:
    """The names and sequences of the chunks of a store, and the names seen last.

    Args:
        identity: fingerprint of the model.
        scope: scope of the chunks. Its offsets count from a chunk's first token.
        prefix: int64, the tokens before every chunk.
        block_tokens: tokens of a block.
    """

    def __init__(
        self, identity: str, scope: Scope, prefix: NDArray[np.int64], block_tokens: int
    ) -> None:
        self._identity = identity
        self._scope = scope
        self.prefix = prefix
        self._block_tokens = block_tokens
        self._seen: OrderedDict[bytes, NDArray[np.uint32]] = OrderedDict()

    def scope_of(self, tokens: int) -> Scope:
        """Return the scope of the sequence of the prefix and a chunk of `tokens` tokens."""
        if not self._scope.extra:
            return self._scope
        offset = len(self.prefix)
        extra = sorted((offset + at, one) for at, one in self._scope.extra if at < tokens)
        return replace(self._scope, extra=tuple(extra))

    def sequence(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return prefix, chunk, and `FILLER` up to a block's end."""
        sequence = np.concatenate((self.prefix, tokens))
        return np.pad(sequence, (0, -len(sequence) % self._block_tokens), constant_values=FILLER)

    def key(self, tokens: NDArray[np.int64]) -> bytes:
        """Return the name of a chunk."""
        name = self._begun(len(tokens))
        name.update(_bytes(tokens))
        return _sealed(name, len(tokens))

    def remember(self, key: bytes, tokens: NDArray[np.int64]) -> None:
        """Remember the tokens of a name."""
        if key in self._seen:
            self._seen.move_to_end(key)
            return
        self._seen[key] = tokens.astype(np.uint32)
        if len(self._seen) > _MOST:
            self._seen.popitem(last=False)

    def get(self, key: bytes) -> NDArray[np.int64] | None:
        """Return the tokens of a remembered name, else None."""
        seen = self._seen.get(key)
        return None if seen is None else seen.astype(np.int64)

    def recall(self, key: bytes, indices: Iterable[Index]) -> NDArray[np.int64] | None:
        """Search the tiers for the tokens of a chunk. Return None if it is not cached.

        Args:
            key: its name.
            indices: results of `BlockManager.index` for the tiers.
        """
        offset = len(self.prefix)
        changes = {at for at, _ in self._scope.extra}
        for path in paths(indices):
            if not np.array_equal(path[:offset], self.prefix):
                continue
            tokens = path[offset:]
            each = _bytes(tokens)
            name = self._begun(0)
            for at in range(len(tokens)):
                if at in changes:
                    name = self._begun(at + 1)
                    name.update(each[: 4 * at])
                name.update(each[4 * at : 4 * at + 4])
                if _sealed(name.copy(), at + 1) == key:
                    self.remember(key, tokens[: at + 1])
                    return tokens[: at + 1]
        return None

    def _begun(self, tokens: int) -> hashlib.blake2b:
        """Return the hash state of a chunk of `tokens` tokens, before its tokens are added."""
        extra = self.scope_of(tokens).extra
        digests = (part for at, one in extra for part in (at.to_bytes(8, "little"), one))
        owner = (self._scope.tenant, self._scope.lora.encode())
        name = hashlib.blake2b(digest_size=32, person=_LABEL)
        for part in (self._identity.encode(), *owner, _bytes(self.prefix), *digests):
            name.update(len(part).to_bytes(8, "little"))
            name.update(part)
        return name


def paths(indices: Iterable[Index]) -> Iterator[NDArray[np.int64]]:
    """Yield the token sequence of each path of blocks, from its first known block to a leaf.

    Args:
        indices: results of `BlockManager.index` for the tiers.
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
    """Return the key of the previous block, and the tokens, from a block's label.

    Layout of the label, written by the core: 32 bytes of usage, perhaps a cost, then the record:
    version, scope, digests, tokens, key of the previous block.
    """
    priced = _USAGE.unpack_from(label)[5]
    begin = _USAGE.size + (_COST_BYTES if priced else 0)
    _, _, _, tokens, parent = _HEAD.unpack_from(label, begin)
    first = begin + _HEAD.size
    return parent, label[first : first + 4 * tokens]


def _bytes(tokens: NDArray[np.int64]) -> bytes:
    """Return the bytes of tokens to hash."""
    return tokens.astype("<u4").tobytes()


def _sealed(name: hashlib.blake2b, tokens: int) -> bytes:
    """Append the number of tokens and return the hash, so the input has a unique split."""
    name.update(tokens.to_bytes(8, "little"))
    return name.digest()
