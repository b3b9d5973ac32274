"""Labels and content keys of blocks identified by an engine's key instead of tokens.

A digest of the engine's key replaces the tokens.
Invariant: equal keys give equal labels and content keys, in every process.
Cost: two hashes of some ten bytes.
"""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING

import numpy as np

from kvtrie._kvtrie import Index

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

__all__ = ["KEY_TOKENS", "content_key", "content_keys", "key_label"]

KEY_TOKENS = 8
"""Tokens of a block in its label."""

_USAGE = struct.Struct("<QQIIB7x")  # age, time to live, uses, session, priority
# No scope, no digests, no previous block.
_RECORD = struct.pack("<BBHII32x", 1, 0, 0, 0, KEY_TOKENS)


def key_label(key: bytes, age: int = 0, uses: int = 1) -> bytes:
    """Return the label of a key's block, in the format of `record.rs`.

    Args:
        key: the engine's key.
        age: nanoseconds since the last use of the block.
        uses: number of uses.
    """
    tokens = hashlib.blake2b(key, digest_size=4 * KEY_TOKENS).digest()
    usage = _USAGE.pack(max(age, 0), 0, min(uses, 2**32 - 1), 0, 0)
    return usage + _RECORD + tokens


def content_keys(keys: Iterable[bytes]) -> NDArray[np.uint8]:
    """Return the content keys `(blocks, 32)` of the blocks of keys, matching their labels."""
    rows = [(key_label(key), slot, 0, 1) for slot, key in enumerate(keys)]
    return Index(rows).key if rows else np.empty((0, 32), np.uint8)


def content_key(key: bytes) -> bytes:
    """Return the content key of the block of a key."""
    return content_keys([key]).tobytes()
