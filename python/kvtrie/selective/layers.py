"""LayerCaches: the caches of a model's layers, and what they have read of a batch of sequences.

Invariant: all layers have the same batch rows and, between passes, have seen the same tokens; rows
of the batch are cropped, selected and reset in all of them or in none. Cost: that of each layer.
"""

# pyright: reportUnknownMemberType=false
# (torch leaves parts untyped)

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvtrie.errors import ConfigError
from kvtrie.selective.continuation import ReadTokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtrie.engines.identity.model_state import ModelState
    from kvtrie.selective.buffered import KVCacheWithBuffers
    from kvtrie.selective.rope import SequenceRope

__all__ = ["LayerCaches"]


class LayerCaches:
    """The caches of all layers of a model.

    Args:
        caches: one per layer, with nothing read.
        batch: their batch rows.
        rope: of their sequences.

    Attributes:
        caches: the `KVCache` of each layer.
        batch: batch rows now.
        read: the tokens that were read.
        rope: what their keys are rotated by.
        model_state: of the model in the passes that were read; None before the first one.
    """

    def __init__(self, caches: list[KVCacheWithBuffers], batch: int, rope: SequenceRope) -> None:
        self.caches = caches
        self.batch = self._opened = batch
        self.read = ReadTokens()
        self.rope = rope
        self.model_state: ModelState | None = None

    @property
    def length(self) -> int:
        """Tokens that were read, padding included."""
        return self.caches[0].input_pos

    @property
    def largest_step(self) -> int:
        """Tokens that the next pass may have."""
        return min(cache.largest_step for cache in self.caches)

    def crop(self, tokens: int) -> None:
        """Forget the last tokens.

        Raises:
            ConfigError: rows were evicted for them, or there are fewer.
        """
        for cache in self.caches:  # all can, or the first that cannot says so before any did
            cache.check_crop(tokens)
        for cache in self.caches:
            cache.crop(tokens)
        self.read.crop(tokens)

    def shrink(self, lengths: Sequence[int]) -> None:
        """Have fewer rows from now on, one number per layer.

        Raises:
            ConfigError: another number of layers, more rows than there are, or too few.
        """
        if len(lengths) != len(self.caches):
            raise ConfigError(f"{len(lengths)} cache lengths for {len(self.caches)} layers")
        for cache, length in zip(self.caches, lengths, strict=True):
            cache.check_shrink(length)
        for cache, length in zip(self.caches, lengths, strict=True):
            cache.shrink(length)

    def select(self, rows: torch.Tensor) -> None:
        """Let the batch become the batch rows at these indices, int64 `(n,)`."""
        for cache in self.caches:
            cache.select(rows)
        self.read.select(rows)
        self.batch = len(rows)

    def repeat(self, times: int) -> None:
        """Let every batch row go on as this number of neighbouring ones."""
        self.select(torch.arange(self.batch).repeat_interleave(times))

    def reset(self) -> None:
        """Forget everything, the scaling of RoPE included; the batch is again the one opened."""
        rows = torch.arange(self._opened) % self.batch
        for cache in self.caches:
            if self.batch != self._opened:
                cache.select(rows)
            cache.reset()
        self.batch = self._opened
        self.read.clear()
        self.rope.fixed = None

    def take(self, other: LayerCaches) -> None:
        """Become what caches of the same model, rows and batch are; both go on independently."""
        self._opened, self.model_state = other._opened, other.model_state
        self.rope.fixed = other.rope.fixed
        self.read.take(other.read)
        for mine, theirs in zip(self.caches, other.caches, strict=True):
            tensors, numbers = theirs.state()
            mine.load_state({name: each.clone() for name, each in tensors.items()}, numbers)
