"""Memory of a fused cache: blocks of a lease, or separate tensors where there is no store.

Fusion computes a layer in one contiguous buffer. Over a lease, `keep` then writes the buffer to the
slots. The lease commits nothing, so no request finds these blocks, and releasing the lease frees
them at once.
Invariant: a closed memory is neither read nor written. Cost: over a lease, a gather per read and a
scatter per write. Tensors only cost their growth.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Protocol

import torch

from kvtrie.errors import ClosedError
from kvtrie.tiers import sole_pool

if TYPE_CHECKING:
    from kvtrie import Lease
    from kvtrie.transfer import Executor

__all__ = ["FusedMemory", "Leased", "Tensors"]

_ROOM = 128
"""Smallest growth of the tensors, in tokens."""


class FusedMemory(Protocol):
    """K and V of a growing sequence: the memory of a fused cache."""

    @property
    def layers(self) -> int:
        """Layers of the model."""
        ...

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` tokens in all.

        Raises:
            NoSpaceError: there is no room.
            ClosedError: the fused cache is closed.
        """
        ...

    def read(self, layer: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return read-only K `(tokens, kv_heads, head_dim)` and V of the first tokens at a layer.

        Raises:
            ClosedError: the fused cache is closed.
        """
        ...

    def write(
        self, layer: int, places: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Put K `(n, kv_heads, head_dim)` and V at reserved positions, int64 `(n,)`."""
        ...


class Tensors:
    """K and V in separate tensors, outside any tier.

    Attributes:
        layers: layers of the model.
        lease: None: nothing is leased.
    """

    lease: Lease | None = None

    def __init__(
        self,
        layers: int,
        widths: tuple[int, int, int],
        tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layers = layers
        heads, *dims = widths
        self._rows = [
            [torch.empty((tokens, heads, dim), dtype=dtype, device=device) for dim in dims]
            for _ in range(layers)
        ]

    def buffer(self, layer: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of a layer to fill: the memory itself."""
        return self.read(layer, tokens)

    def keep(self, layer: int, places: torch.Tensor | None = None) -> None:
        """Do nothing: the buffer is the memory."""

    def restore(self, layer: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the buffer of a layer as it was kept."""
        return self.read(layer, tokens)

    def done(self) -> None:
        """Do nothing: fusion used no extra buffer."""

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` tokens in all."""
        self._open()
        if tokens > len(self._rows[0][0]):
            self._rows = [
                [
                    torch.cat([each, each.new_empty((tokens - len(each) + _ROOM, *each.shape[1:]))])
                    for each in pair
                ]
                for pair in self._rows
            ]

    def read(self, layer: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of K and V of the first tokens."""
        self._open()
        keys, values = self._rows[layer]
        return keys[:tokens], values[:tokens]

    def write(
        self, layer: int, places: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Put K and V of some tokens at their positions."""
        self._open()
        for rows, new in zip(self._rows[layer], (keys, values), strict=True):
            rows[places] = new

    def close(self) -> None:
        """Free the tensors."""
        self._rows = []

    def _open(self) -> None:
        if not self._rows:
            raise ClosedError("the fused cache is closed: fuse the chunks again")


class Leased:
    """K and V in blocks of the first tier.

    Args:
        executor: owner of the first tier.
        lease: a lease with room for the sequence and no committed block. It is released when this
            object is closed or garbage-collected.

    Attributes:
        layers: layers of the model.
        lease: holds the blocks; None once closed.

    Raises:
        ConfigError: the first tier has no memory.
    """

    def __init__(self, executor: Executor, lease: Lease) -> None:
        pool = sole_pool(executor.pools[0], "for a fused cache")
        self.layers = pool.layers
        self.lease: Lease | None = lease
        self._executor = executor
        self._pool = pool
        self._table = pool.table(lease.slots(0))
        self._scratch: tuple[torch.Tensor, torch.Tensor] | None = None
        self._places = (torch.arange(0), torch.arange(0))
        self._end_of_life = weakref.finalize(self, _release, executor, lease)
        self._end_of_life.atexit = False

    def buffer(self, layer: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ARG002 - shared by all layers
        """Return K and V of a layer to fill: all layers share the buffer, old content is lost."""
        self._open()
        if self._scratch is None or len(self._scratch[0]) < tokens:
            keys, values = self._pool.keys, self._pool.values
            self._scratch = (
                keys.new_empty((tokens, *keys.shape[1:])),
                values.new_empty((tokens, *values.shape[1:])),
            )
        return self._scratch[0][:tokens], self._scratch[1][:tokens]

    def keep(self, layer: int, places: torch.Tensor | None = None) -> None:
        """Write the buffer, or only the given positions, to the slots of a layer."""
        assert self._scratch is not None  # noqa: S101 - set by `buffer`
        keys, values = self._scratch
        if places is None:
            tokens = min(len(keys), self._table.shape[1] * self._pool.block_tokens)
            blocks, offsets = self._first(tokens)
            units = self._table[layer, blocks]
            self._pool.scatter(units, offsets, keys[:tokens], values[:tokens])
        else:
            self.write(layer, places, keys[places], values[places])

    def restore(self, layer: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Fill the buffer from the slots of a layer and return it."""
        for buffer, rows in zip(self.buffer(layer, tokens), self.read(layer, tokens), strict=True):
            buffer.copy_(rows)
        return self.buffer(layer, tokens)

    def done(self) -> None:
        """Free the buffer: fusion has ended."""
        self._scratch = None

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` tokens in all.

        Raises:
            NoSpaceError: the first tier cannot hold them.
        """
        lease = self._open()
        if tokens > self._table.shape[1] * self._pool.block_tokens:
            lease.reserve(tokens, now=self._executor.clock())
            self._executor.wait(lease)
            self._table = self._pool.table(lease.slots(0))

    def read(self, layer: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of the first tokens, copied out of their slots."""
        self._open()
        blocks, offsets = self._first(tokens)
        return self._pool.gather(self._table[layer, blocks], offsets)

    def write(
        self, layer: int, places: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Put K and V of some tokens into the slots of their positions."""
        self._open()
        size = self._pool.block_tokens
        units = self._table[layer, places // size]
        self._pool.scatter(units, places % size, keys, values)

    def close(self) -> None:
        """Release the lease: its blocks are free at once."""
        self._end_of_life()
        self.lease = self._scratch = None

    def _first(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return blocks and offsets of the first tokens, int64 `(tokens,)`, as for all layers."""
        if tokens > len(self._places[0]):
            at = torch.arange(tokens + _ROOM, device=self._pool.device)
            self._places = at // self._pool.block_tokens, at % self._pool.block_tokens
        blocks, offsets = self._places
        return blocks[:tokens], offsets[:tokens]

    def _open(self) -> Lease:
        if self.lease is None:
            raise ClosedError("the fused cache is closed: fuse the chunks again")
        return self.lease


def _release(executor: Executor, lease: Lease) -> None:
    lease.release(now=executor.clock())
