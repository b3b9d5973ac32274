"""LayerCopies: copies many blocks between two pools, a range of layers at a time.

A layer-wise pass advances the copies with its computation: loads before a layer reads them, stores
after a layer is written. Copies run on the caller's stream.
Invariant: `advance` copies each layer of a block once, in order. A block with a failed copy is
skipped in later layers, and the remaining blocks continue.
Cost: a `copy_from` per call for all blocks. After a failure, a `copy_from` per block.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self, TypeAlias

    from numpy.typing import NDArray

    from kvtrie.tiers import Pool

    CopyUnits: TypeAlias = Callable[[Pool, NDArray[np.int64], Pool, NDArray[np.int64]], None]

__all__ = ["LayerCopies"]

_LOG = logging.getLogger(__name__)


class LayerCopies:
    """Blocks being copied between two pools.

    Args:
        source: the pool to read.
        source_units: int64 `(blocks, layers)`, the unit of each layer of each block.
        target: the pool to write.
        target_units: int64 `(blocks, layers)`, the same for the target.
        copy: copies units; `target.copy_from` by default.

    Attributes:
        blocks: int64, indices of the blocks without a failed copy.
        done: number of layers copied by `advance`.
    """

    def __init__(
        self,
        source: Pool,
        source_units: NDArray[np.int64],
        target: Pool,
        target_units: NDArray[np.int64],
        *,
        copy: CopyUnits | None = None,
    ) -> None:
        self.source, self._source_units = source, source_units
        self.target, self._target_units = target, target_units
        self._copy = copy or _straight
        self.blocks = np.arange(len(source_units))
        self.done = 0

    @classmethod
    def of_slots(
        cls,
        source: Pool,
        target: Pool,
        slots: NDArray[np.integer],
        layers: tuple[int, int],
        *,
        copy: CopyUnits | None = None,
    ) -> Self:
        """Return copies of a range of layers of blocks in slots.

        Layers count from the start of the range.

        Args:
            source: the pool to read.
            target: the pool to write.
            slots: `(blocks, 2)`, source and destination slot of each block.
            layers: the range of layers; a single layer if a slot holds only one.
            copy: copies units; `target.copy_from` by default.
        """
        each = np.arange(layers[1] - layers[0])
        rows = slots.astype(np.int64, copy=False)
        return cls(
            source,
            source.layer_units(rows[:, 0], layers[0])[:, None] + each,
            target,
            target.layer_units(rows[:, 1], layers[0])[:, None] + each,
            copy=copy,
        )

    @property
    def layers(self) -> int:
        """Layers of each block."""
        return self._source_units.shape[1]

    def copy(self, first: int, upto: int) -> None:
        """Copy layers `[first, upto)` of all blocks without a failure, in a single call."""
        self._copy_blocks(self.blocks, first, upto)

    def advance(self, upto: int) -> dict[int, str]:
        """Copy the missing layers before `upto`, together or, after an error, block by block.

        Returns:
            The reason of each failed copy, by index of the block.
        """
        first, self.done = self.done, max(upto, self.done)
        if first == self.done or not len(self.blocks):
            return {}
        try:
            self.copy(first, upto)
        except Exception as error:  # noqa: BLE001 - a single block may have caused it
            _LOG.warning("%d blocks are copied one by one: %s", len(self.blocks), error)
        else:
            return {}
        failed: dict[int, str] = {}
        for at, block in enumerate(self.blocks.tolist()):
            try:
                self._copy_blocks(self.blocks[at : at + 1], first, upto)
            except Exception as error:  # noqa: BLE001 - any error fails only this block
                failed[block] = f"{type(error).__name__}: {error}"
        self.blocks = np.setdiff1d(self.blocks, [*failed])
        return failed

    def _copy_blocks(self, blocks: NDArray[np.int64], first: int, upto: int) -> None:
        self._copy(
            self.source,
            self._source_units[blocks, first:upto].reshape(-1),
            self.target,
            self._target_units[blocks, first:upto].reshape(-1),
        )


def _straight(
    source: Pool, source_units: NDArray[np.int64], target: Pool, units: NDArray[np.int64]
) -> None:
    target.copy_from(source, source_units, units)
