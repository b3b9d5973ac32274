"""NativeParts: an engine's memory with some blocks copied unconverted, in parts.

A tier in fewer bits has smaller slots. A block kept in the engine's format needs several slots:
each slot has a range of the bytes of every layer, the last slot fewer bytes. In an engine with `n`
slots, slot `(p + 1) * n + s` is part `p` of the block in slot `s`. Slots below `n` are converted as
in `EnginePool`.
Invariant: parts written together or in sequence give the block's original bytes.
Cost: an `EnginePool` copy through dense memory of a piece. Parts written separately also need a
read of their block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvtrie.kernels import copy_rows
from kvtrie.kernels.formats import VECTOR_BYTES
from kvtrie.tiers.engine_pool import EnginePool

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch
    from numpy.typing import NDArray

    from kvtrie.model.shape import ModelShape
    from kvtrie.tiers.pool import Pool

__all__ = ["NativeParts"]


class NativeParts(EnginePool):
    """The memory of a tier with `owner="engine"`, with some blocks in parts on lower tiers.

    Args:
        model: the shape of the model.
        block_tokens: tokens per block.
        tensors: the tensor of each layer, or its K and V tensors, blocks first.
        parts: parts of a block.

    Raises:
        ConfigError: as for `EnginePool`.
    """

    def __init__(
        self,
        model: ModelShape,
        block_tokens: int,
        tensors: Sequence[torch.Tensor | Sequence[torch.Tensor]],
        *,
        parts: int,
    ) -> None:
        super().__init__(model, block_tokens, tensors)
        self._parts_of_block = parts
        self._converted = self.blocks * self.layers  # lower units are converted
        self.blocks *= parts + 1

    def copy_from(
        self, source: Pool, source_units: NDArray[np.int64], units: NDArray[np.int64]
    ) -> None:
        """Copy whole units of a pool into the engine's tensors, see `EnginePool`."""
        whole = units < self._converted
        if whole.any():
            super().copy_from(source, source_units[whole], units[whole])
        if whole.all():
            return
        self._require(source)
        (plane,) = source.planes
        units, source_units = units[~whole], source_units[~whole]
        for blocks, dense, rows in self._pieces(units):
            dense_units = np.arange(len(blocks))
            if len(rows) < len(blocks) * self._parts_of_block:
                super().copy_into(blocks, dense, dense_units)
            for part, at, inside in self._by_part(units[rows], blocks, plane.shape[1]):
                copy_rows(
                    plane[:, : inside.stop - inside.start],
                    source_units[rows[part]],
                    dense.planes[0][:, inside],
                    at,
                )
            super().copy_from(dense, dense_units, blocks)

    def convert_into(
        self, units: NDArray[np.int64], target: Pool, target_units: NDArray[np.int64]
    ) -> None:
        """Copy whole units into a pool with a different format, see `EnginePool`."""
        whole = units < self._converted
        if whole.any():
            super().convert_into(units[whole], target, target_units[whole])
        if whole.all():
            return
        self._require(target)
        (plane,) = target.planes
        units, target_units = units[~whole], target_units[~whole]
        for blocks, dense, rows in self._pieces(units):
            super().copy_into(blocks, dense, np.arange(len(blocks)))
            for part, at, inside in self._by_part(units[rows], blocks, plane.shape[1]):
                copy_rows(
                    dense.planes[0][:, inside],
                    at,
                    plane[:, : inside.stop - inside.start],
                    target_units[rows[part]],
                )

    def _pieces(
        self, units: NDArray[np.int64]
    ) -> Iterator[tuple[NDArray[np.int64], Pool, NDArray[np.intp]]]:
        """Yield the whole units of parts, dense memory for them, and the rows of their parts."""
        blocks, which = np.unique(units % self._converted, return_inverse=True)
        for piece, dense in self._dense(len(blocks)):
            inside = (which >= piece.start) & (which < piece.stop)
            yield blocks[piece], dense, np.flatnonzero(inside)

    def _by_part(
        self, units: NDArray[np.int64], blocks: NDArray[np.int64], most: int
    ) -> Iterator[tuple[NDArray[np.intp], NDArray[np.intp], slice]]:
        """Yield for each part its rows in `units`, their places in `blocks`, and its byte range."""
        vectors = -(-self.unit_bytes // (self._parts_of_block * VECTOR_BYTES))
        size = min(vectors * VECTOR_BYTES, most)
        numbers = units // self._converted - 1
        for number in np.unique(numbers).tolist():
            rows = np.flatnonzero(numbers == number)
            at = np.searchsorted(blocks, units[rows] % self._converted)
            first = number * size
            if first < self.unit_bytes:
                yield rows, at, slice(first, min(first + size, self.unit_bytes))
