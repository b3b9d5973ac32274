"""WindowCell: one layer's window while a row of cells is worked on, forwards and backwards.

Within a cell torch differentiates attention. The rows at a cell's start are leaves; the cell to the
left is given their gradients as those of its last rows.
Invariant: the gradients of a window's rows cross the border of two cells once. Cost: the graph
keeps K and V of the window once per step.
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
        model: the cache of the forward phase: sizes, format and padding are taken from it.
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
        """Take the next step; see `KVCache.forward`.

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
        """Roots of the cell's backward pass: its last rows, where the next cell has used them."""
        pair = (self._keys, self._values)
        ends = zip(pair, self._given, strict=False)
        return [(rows, grad) for rows, grad in ends if rows.requires_grad]

    def start(self) -> Start:
        """The state at which the next cell starts; a copy."""
        keys, values = self.keys_values()
        return Start(keys.clone(), values.clone(), self.token_pos, self.step, self.input_pos, 0)

    def begin(self, start: Start | None) -> None:
        """Go to the start of a cell; None is the first one."""
        self._given = tuple(
            torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in self._leaves
        )
        self.reset()
        if start is not None:
            self._keys, self._values = start.keys, start.values
            self.step, self.input_pos = start.step, start.input_pos

    def differentiate(self) -> None:
        """Let the rows that the cell starts with be leaves."""
        self._leaves = ()
        if self.input_pos:
            pair = (self._keys.detach().requires_grad_(), self._values.detach().requires_grad_())
            self._keys, self._values = self._leaves = pair

    def reset(self) -> None:
        """Go back before the first step."""
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
        """Zeros: nothing is chosen."""
        return torch.zeros_like(self.token_pos, dtype=torch.float32)

    def keys_values(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the rows."""
        return self._keys, self._values

    @property
    def largest_step(self) -> int:
        """Any number of tokens."""
        return _MOST
