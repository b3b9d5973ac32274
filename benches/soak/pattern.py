"""Pattern: the KV that a token has, as if a model had computed it.

Every eight bytes are a hash of all tokens up to there, the marks among them, the layer, K or V,
and the place in the row, so bytes of another block, tenant, image, layer, position or place differ
from what they must be, and so does a single flipped bit.
Invariant: equal tokens have equal KV in every run. Cost: about a nanosecond per byte.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

_MIX = np.uint64(0x9E3779B97F4A7C15)


class Pattern:
    """The KV of sequences.

    Args:
        layers: layers of the model.
        words: eight bytes each, of K and as many of V, per token and layer.
        most: tokens that a sequence may have.
    """

    def __init__(self, layers: int, words: int, most: int) -> None:
        draw = np.random.default_rng(7)
        # Odd factors: no token is lost in the sum, whatever its place.
        self._factors = draw.integers(0, 1 << 64, most, dtype=np.uint64) | np.uint64(1)
        self._lanes = draw.integers(0, 1 << 64, (layers, 1, 2, words), dtype=np.uint64)

    def of(
        self, tokens: NDArray[np.uint32], marks: Iterable[tuple[int, bytes]] = ()
    ) -> NDArray[np.uint64]:
        """uint64 `(layers, tokens, 2, words)`: K and V of every token of a sequence.

        Args:
            tokens: the sequence.
            marks: text before tokens, by their places: all tokens from there on depend on it.
        """
        terms = (tokens.astype(np.uint64) + np.uint64(1)) * self._factors[: len(tokens)]
        for at, mark in marks:
            terms[at : at + 1] += np.frombuffer(blake2b(mark, digest_size=8).digest(), np.uint64)
        mixed = np.cumsum(terms, dtype=np.uint64)[:, None, None] ^ self._lanes
        mixed ^= mixed >> np.uint64(32)
        mixed *= _MIX
        mixed ^= mixed >> np.uint64(29)
        return mixed
