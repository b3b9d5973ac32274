"""LayerCaches: the caches of a model's layers, and the tokens read of a batch of sequences.

Invariant: all layers have the same batch rows and, between passes, have read the same tokens. Rows
of the batch are cropped, selected and reset in all layers or in none. Cost: the sum over layers.
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
        caches: an empty cache per layer.
        batch: number of batch rows.
        rope: RoPE of the sequences.

    Attributes:
        caches: the `KVCache` of each layer.
        batch: current number of batch rows.
        read: the tokens read.
        rope: RoPE of the keys.
        model_state: state of the model during the passes, None before the first pass.
    """

    def __init__(self, caches: list[KVCacheWithBuffers], batch: int, rope: SequenceRope) -> None:
        self.caches = caches
        self.batch = self._opened = batch
        self.read = ReadTokens()
        self.rope = rope
        self.model_state: ModelState | None = None

    @property
    def length(self) -> int:
        """Number of tokens read, including padding."""
        return self.caches[0].input_pos

    @property
    def largest_step(self) -> int:
        """Largest number of tokens of the next pass."""
        return min(cache.largest_step for cache in self.caches)

    def crop(self, tokens: int) -> None:
        """Forget the last tokens.

        Raises:
            ConfigError: rows were evicted, or fewer tokens were read.
        """
        for cache in self.caches:  # check all layers before changing any
            cache.check_crop(tokens)
        for cache in self.caches:
            cache.crop(tokens)
        self.read.crop(tokens)

    def shrink(self, lengths: Sequence[int]) -> None:
        """Reduce the number of rows of each layer.

        Raises:
            ConfigError: a wrong number of layers, more rows than now, or too few rows.
        """
        if len(lengths) != len(self.caches):
            raise ConfigError(f"{len(lengths)} cache lengths for {len(self.caches)} layers")
        for cache, length in zip(self.caches, lengths, strict=True):
            cache.check_shrink(length)
        for cache, length in zip(self.caches, lengths, strict=True):
            cache.shrink(length)

    def select(self, rows: torch.Tensor) -> None:
        """Replace the batch by the batch rows at these indices, int64 `(n,)`."""
        for cache in self.caches:
            cache.select(rows)
        self.read.select(rows)
        self.batch = len(rows)

    def repeat(self, times: int) -> None:
        """Replace every batch row by `times` adjacent copies."""
        self.select(torch.arange(self.batch).repeat_interleave(times))

    def reset(self) -> None:
        """Forget all tokens and the scaling of RoPE, and restore the initial batch size."""
        rows = torch.arange(self._opened) % self.batch
        for cache in self.caches:
            if self.batch != self._opened:
                cache.select(rows)
            cache.reset()
        self.batch = self._opened
        self.read.clear()
        self.rope.fixed = None

    def take(self, other: LayerCaches) -> None:
        """Copy the state of caches of the same model, rows and batch."""
        self._opened, self.model_state = other._opened, other.model_state
        self.rope.fixed = other.rope.fixed
        self.read.take(other.read)
        for mine, theirs in zip(self.caches, other.caches, strict=True):
            tensors, numbers = theirs.state()
            mine.load_state({name: each.clone() for name, each in tensors.items()}, numbers)
