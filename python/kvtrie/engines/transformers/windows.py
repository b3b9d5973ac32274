"""Windows: K and V of the last tokens of running rows, in layers with a sliding window.

Windows are tensors of the cache. A commit copies their columns to the slots of its blocks, and
opening a cache reads them at the end of the match.
Invariant: a layer holds the columns visible to the next query and the last block of columns, as far
as there are columns. Cost: per pass and layer one concatenation. Memory per row: the window and a
block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtrie.engines.transformers.group_blocks import GroupBlocks
    from kvtrie.engines.transformers.rows import Row

__all__ = ["WindowLayer", "Windows"]


class Windows:
    """The windows of a batch of rows.

    Args:
        groups: the groups of layers with a window.

    Attributes:
        layers: the windows, by layer of the model.
        late: layers with a window not yet read, with their group and index in it.
    """

    def __init__(self, groups: Sequence[GroupBlocks]) -> None:
        self._groups = groups
        self.late: dict[int, tuple[GroupBlocks, int]] = {}
        self.layers = {
            layer: WindowLayer(group.window, group.pool.block_tokens)
            for group in groups
            for layer in group.layers
        }

    def expect(self) -> None:
        """Begin with a row, and read its window layer by layer as loads arrive."""
        self.late = {
            layer: (group, at) for group in self._groups for at, layer in enumerate(group.layers)
        }

    def read(self, layer: int, row: Row, tokens: int) -> None:
        """Read the window of a layer after `tokens` of the only row.

        Raises:
            TransferError: a failed load has shortened the match.
        """
        group, index = self.late[layer]
        if slots := group.last(row, tokens):
            self.layers[layer].fill(*group.tokens(slots, index))

    def adopt(self, other: Windows) -> None:
        """Take layers not yet read from the windows of a different batch."""
        for layer in self.late:
            self.layers[layer] = other.layers[layer]
        self.late = {}

    def write(self, at: int, row: Row, filled: range, end: int) -> None:
        """Write windows to the slots of blocks filled by a pass.

        Args:
            at: index of the row in the batch.
            row: the row.
            filled: the blocks, by index in the row.
            end: the end column of the pass.
        """
        for group in self._groups:
            size = group.pool.block_tokens
            for place, slot in group.taken(row, filled):
                start = row.pad + place * size - end
                for index, layer in enumerate(group.layers):
                    unit = slot * len(group.layers) + index
                    self.layers[layer].block(at, start, size, group.pool.view(unit))

    def take(self, others: Sequence[Windows], rows: Sequence[Sequence[int]]) -> None:
        """Concatenate selected rows of the windows of several batches."""
        for layer, window in self.layers.items():
            window.take([one.layers[layer] for one in others], rows)

    def trim(self) -> None:
        """Drop columns not needed by later queries and commits."""
        for window in self.layers.values():
            window.trim()


class WindowLayer:
    """K and V `(batch, heads, columns, dim)` up to the last column.

    Args:
        window: tokens visible to a query, itself included.
        block: tokens of a block. At least this number of columns is kept for a commit.
    """

    def __init__(self, window: int, block: int) -> None:
        self.window = window
        self._least = max(window - 1, block)
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None

    def visible(self, past: int) -> int:
        """Return the number of cached columns visible to the next query, out of `past`."""
        return min(past, self.window - 1)

    def fill(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Set K and V of the last columns."""
        self.keys, self.values = keys, values

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, past: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append new columns. Return all columns visible to them, with themselves."""
        wanted = self.visible(past) + keys.shape[2]
        self.keys = _appended(self.keys, keys)
        self.values = _appended(self.values, values)
        return _last(self.keys, wanted), _last(self.values, wanted)

    def trim(self) -> None:
        """Drop columns not needed by later queries and commits."""
        if self.keys is None or self.values is None:
            return
        if self.keys.shape[2] > 2 * self._least:  # not in every pass, as it copies
            self.keys = self.keys[:, :, -self._least :].contiguous()
            self.values = self.values[:, :, -self._least :].contiguous()

    def block(
        self, row: int, start: int, size: int, out: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        """Copy K and V of a row's block, starting `-start` columns before the end."""
        if self.keys is None or self.values is None:
            raise IndexError("a window without a column has no block")
        for kept, target in zip((self.keys, self.values), out, strict=True):
            first = kept.shape[2] + start
            target.copy_(kept[row, :, first : first + size].transpose(0, 1))

    def take(self, layers: Sequence[WindowLayer], rows: Sequence[Sequence[int]]) -> None:
        """Concatenate selected rows of layers. Shorter layers get columns of zeros in front."""
        longest = max(
            (layer.keys.shape[2] for layer in layers if layer.keys is not None), default=0
        )
        if not longest:
            return
        for name in ("keys", "values"):
            kept = [getattr(layer, name) for layer in layers]
            like = next(each for each in kept if each is not None)
            parts = [
                like.new_zeros((len(pick), like.shape[1], longest, like.shape[3]))
                if each is None
                else _last(each[list(pick)], longest)
                for each, pick in zip(kept, rows, strict=True)
            ]
            setattr(self, name, torch.cat(parts))


def _appended(kept: torch.Tensor | None, new: torch.Tensor) -> torch.Tensor:
    return new if kept is None else torch.cat([kept, new], dim=2)


def _last(kept: torch.Tensor, wanted: int) -> torch.Tensor:
    """Return the last columns. Columns not kept are zeros, hidden by masks."""
    lacking = wanted - kept.shape[2]
    if lacking > 0:
        return torch.nn.functional.pad(kept, (0, 0, lacking, 0))
    return kept[:, :, -wanted:]
