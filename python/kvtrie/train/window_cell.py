"""WindowCell: a layer's window during the forward and backward pass of a row of cells.

Within a cell torch differentiates attention. The rows at a cell's start are leaves. Their gradients
become the gradients of the last rows of the cell to the left.
Invariant: the gradients of a window's rows cross the border of two cells once. Cost: the graph
keeps a copy of K and V of the window per step.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (torch leaves parts untyped)

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvtrie.kernels import attend_ordered
from kvtrie.selective import KVCache
from kvtrie.train.cell import RowsAreIn, Start

if TYPE_CHECKING:
    from kvtrie.selective import KVCacheWithBuffers

__all__ = ["WindowCell"]

_MOST = 2**31 - 1


class WindowCell(KVCache):
    """The newest rows of a layer with a window, with gradients.

    Args:
        model: the cache of the forward phase, with sizes, format and padding.
        forward_gb: bound of attention's temporary arrays, in 10^9 bytes.
    """

    def __init__(self, model: KVCacheWithBuffers, *, forward_gb: float = 3.0) -> None:
        self.scale = None
        self.span, self.first = model.span, model.first
        self.replay_log = None
        self.only_rows = False
        self._place, self._forward_gb = model.place, forward_gb
        self._leaves: tuple[torch.Tensor, ...] = ()
        self._given: tuple[torch.Tensor, ...] = ()
        self.reset()

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Run the next step, see `KVCache.forward`.

        Raises:
            RowsAreIn: `only_rows` is set and the rows are written.
        """
        keys = torch.cat((self._keys, key), dim=2)
        values = torch.cat((self._values, value), dim=2)
        start, rows = self.input_pos, self._place.shape[2]
        self._keys, self._values = keys[:, :, -rows:], values[:, :, -rows:]
        self.input_pos += key.shape[2]
        self.step += 1
        if self.only_rows:
            raise RowsAreIn
        return attend_ordered(
            query,
            keys,
            values,
            span=self.span,
            input_pos=start,
            first=self.first,
            scale=self.scale,
            terms=self.terms,
            tmp_array_limit_gb=self._forward_gb,
        )

    def ends(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the roots of the backward pass: the last rows, with the next cell's gradients."""
        pair = (self._keys, self._values)
        ends = zip(pair, self._given, strict=False)
        return [(rows, grad) for rows, grad in ends if rows.requires_grad]

    def start(self) -> Start:
        """Return a copy of the state, the start of the next cell."""
        keys, values = self.keys_values()
        return Start(keys.clone(), values.clone(), self.token_pos, self.step, self.input_pos, 0)

    def begin(self, start: Start | None) -> None:
        """Set the state to the start of a cell, None for the first cell."""
        self._given = tuple(
            torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in self._leaves
        )
        self.reset()
        if start is not None:
            self._keys, self._values = start.keys, start.values
            self.step, self.input_pos = start.step, start.input_pos

    def differentiate(self) -> None:
        """Make the rows at the start of the cell leaves of the graph."""
        self._leaves = ()
        if self.input_pos:
            pair = (self._keys.detach().requires_grad_(), self._values.detach().requires_grad_())
            self._keys, self._values = self._leaves = pair

    def reset(self) -> None:
        """Reset to the state before the first step."""
        self.step = self.input_pos = 0
        batch, heads, _, dim = self._place.shape
        empty = torch.zeros(
            (batch, heads, 0, dim), dtype=self._place.dtype, device=self._place.device
        )
        self._keys = self._values = empty

    @property
    def token_pos(self) -> torch.Tensor:
        """Positions of the rows' tokens."""
        batch, heads, rows = self._keys.shape[:3]
        places = torch.arange(
            self.input_pos - rows, self.input_pos, dtype=torch.int32, device=self._keys.device
        )
        return places.expand(batch, heads, rows).clone()

    @property
    def scores(self) -> torch.Tensor:
        """Zeros: a window needs no scores."""
        return torch.zeros_like(self.token_pos, dtype=torch.float32)

    def keys_values(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of the rows."""
        return self._keys, self._values

    @property
    def largest_step(self) -> int:
        """A very large number: steps may have any length."""
        return _MOST
