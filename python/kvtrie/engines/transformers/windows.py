"""Windows: K and V of the last tokens of running rows, in layers with a sliding window.

They are tensors of the cache: a block gets its part when it is committed, in the slot that the
commit names, and opening a cache reads them at the border of the match.
Invariant: a layer holds the columns that the next query sees and the last block's worth of columns,
from the first row's padding on at most. Cost: per pass and layer one concatenation; of memory, per
row the window and a block.
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
        groups: the groups of layers that have one.

    Attributes:
        layers: by layer of the model, its window.
        late: layers whose window is still to be read, with their group and place in it.
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
        """Begin with a row whose window is read layer by layer, as each layer has come."""
        self.late = {
            layer: (group, at) for group in self._groups for at, layer in enumerate(group.layers)
        }

    def read(self, layer: int, row: Row, tokens: int) -> None:
        """Read what queries after some tokens of the only row see in a layer.

        Raises:
            TransferError: the row's match is shorter now.
        """
        group, index = self.late[layer]
        if slots := group.last(row, tokens):
            self.layers[layer].fill(*group.tokens(slots, index))

    def adopt(self, other: Windows) -> None:
        """Take the layers that are still to be read from another cache."""
        for layer in self.late:
            self.layers[layer] = other.layers[layer]
        self.late = {}

    def write(self, at: int, row: Row, filled: range, end: int) -> None:
        """Write windows to the slots of the blocks that a pass has filled.

        Args:
            at: the row of the batch.
            row: its lease.
            filled: the blocks, by their place in the row.
            end: the column at which the pass ended.
        """
        for group in self._groups:
            size = group.pool.block_tokens
            for place, slot in group.taken(row, filled):
                start = row.pad + place * size - end
                for index, layer in enumerate(group.layers):
                    unit = slot * len(group.layers) + index
                    self.layers[layer].block(at, start, size, group.pool.view(unit))

    def take(self, others: Sequence[Windows], rows: Sequence[Sequence[int]]) -> None:
        """Take rows of the windows of caches, one after another."""
        for layer, window in self.layers.items():
            window.take([one.layers[layer] for one in others], rows)

    def trim(self) -> None:
        """Forget columns that neither a query nor a commit will need."""
        for window in self.layers.values():
            window.trim()


class WindowLayer:
    """K and V `(batch, heads, columns, dim)` up to the last column.

    Args:
        window: tokens that a query sees, itself included.
        block: tokens of a block: as many columns are kept for a commit.
    """

    def __init__(self, window: int, block: int) -> None:
        self.window = window
        self._least = max(window - 1, block)
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None

    def visible(self, past: int) -> int:
        """Cached columns that the next query sees, of `past` ones."""
        return min(past, self.window - 1)

    def fill(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Take K and V of the columns before the next one."""
        self.keys, self.values = keys, values

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, past: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append new columns; return those that they see, with themselves."""
        wanted = self.visible(past) + keys.shape[2]
        self.keys = _appended(self.keys, keys)
        self.values = _appended(self.values, values)
        return _last(self.keys, wanted), _last(self.values, wanted)

    def trim(self) -> None:
        """Forget columns that neither a query nor a commit will need."""
        if self.keys is None or self.values is None:
            return
        if self.keys.shape[2] > 2 * self._least:  # not in every pass, as it copies
            self.keys = self.keys[:, :, -self._least :].contiguous()
            self.values = self.values[:, :, -self._least :].contiguous()

    def block(
        self, row: int, start: int, size: int, out: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        """Copy K and V of a block of a row, which starts `-start` columns before the end."""
        if self.keys is None or self.values is None:
            raise IndexError("a window without a column has no block")
        for kept, target in zip((self.keys, self.values), out, strict=True):
            first = kept.shape[2] + start
            target.copy_(kept[row, :, first : first + size].transpose(0, 1))

    def take(self, layers: Sequence[WindowLayer], rows: Sequence[Sequence[int]]) -> None:
        """Take rows of layers, one after another; shorter ones get columns of zeros in front."""
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
    """The last columns; columns that were not kept are zeros, which masks hide."""
    lacking = wanted - kept.shape[2]
    if lacking > 0:
        return torch.nn.functional.pad(kept, (0, 0, lacking, 0))
    return kept[:, :, -wanted:]
