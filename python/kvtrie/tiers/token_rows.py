"""TokenRows: K or V of single tokens in the memory of a pool.

Tokens are rows of the memory, or of its pages if units do not start at rows.
Invariant: rows are views of the memory.
Cost: a call per read or write.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvtrie.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    from kvtrie.tiers.group_slots import GroupSlots

__all__ = ["TokenRows"]


@dataclass(frozen=True, slots=True)
class TokenRows:
    """K or V of all tokens.

    Attributes:
        slots: the slots with the places of their units.
        numbers: the memory as `(rows, heads, dim)`, or, if units do not start at rows, as `(pages,
            slots of a page, layers, block_tokens, heads, dim)`.
        step: rows per unit, or 0 if units do not start at rows.
        first: rows of a unit before its first token.
    """

    slots: GroupSlots
    numbers: torch.Tensor
    step: int
    first: int

    @classmethod
    def both(cls, slots: GroupSlots, planes: Sequence[torch.Tensor]) -> tuple[Self, Self]:
        """Return K and V of a pool.

        Args:
            slots: the slots with the places of their units.
            planes: the bytes, uint8 `(rows, bytes)`: a joined tensor, or separate for K and V.

        Raises:
            ConfigError: the number format is not the model's, or only known to an engine.
        """
        fmt, layout = slots.block_format, slots.block_format.layout
        if layout.opaque:
            raise ConfigError(f"only {layout.opaque!r} knows what the pool's bytes mean")
        if layout.scales != "none":
            raise ConfigError(
                f"the pool holds codes of {layout.dtype} with scales by {layout.scales!r}, and no "
                "rows of tokens: read it through `pages`, or int4 by a copy"
            )
        # A group keeps a latent row once, without numbers for V.
        v_dim = 0 if layout.latent and slots.group is not None else fmt.v_head_dim
        before = 0 if layout.latent or len(planes) > 1 else fmt.block_tokens * fmt.head_dim
        keys = cls._of(slots, planes[0], fmt.head_dim, 0)
        return keys, cls._of(slots, planes[-1], v_dim, before)

    @classmethod
    def _of(cls, slots: GroupSlots, plane: torch.Tensor, dim: int, before: int) -> Self:
        """Return tokens with `dim` numbers per head, preceded by `before` numbers in their unit."""
        fmt = slots.block_format
        row, before = fmt.heads * dim, fmt.heads * before
        numbers = plane.view(-1).view(getattr(torch, fmt.layout.dtype))
        unit = (slots.unit_bytes if slots.group is not None else plane.shape[1]) // numbers.itemsize
        if slots.even and row and not (unit % row or before % row):
            return cls(slots, numbers.view(-1, fmt.heads, dim), unit // row, before // row)
        page, slot = slots.page // numbers.itemsize, fmt.layers * unit
        shape = (len(numbers) // page, slots.per_page, fmt.layers, fmt.block_tokens, fmt.heads, dim)
        return cls(slots, numbers[before:].as_strided(shape, (page, slot, unit, row, dim, 1)), 0, 0)

    @property
    def all(self) -> torch.Tensor:
        """All tokens, `(rows, heads, dim)`: a view of the memory.

        Raises:
            ConfigError: a unit does not start at a row.
        """
        if not self.step:
            raise ConfigError("slots of this group do not start at rows of tokens: use `view`")
        return self.numbers

    def read(
        self, units: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor | None
    ) -> torch.Tensor:
        """Copy tokens out, `(n, heads, dim)`, see `Pool.gather`."""
        if self.step:
            return torch.index_select(self.numbers, 0, self._rows(units, offsets), out=out)
        found = self.numbers[(*self._places(units), offsets)]
        return found if out is None else out.copy_(found)

    def write(self, units: torch.Tensor, offsets: torch.Tensor, tokens: torch.Tensor) -> None:
        """Write tokens, `(n, heads, dim)`, see `Pool.scatter`."""
        if self.step:
            self.numbers.index_copy_(0, self._rows(units, offsets), tokens)
        else:
            self.numbers[(*self._places(units), offsets)] = tokens

    def view(self, unit: int) -> torch.Tensor:
        """Return the tokens of a unit, `(block_tokens, heads, dim)`, without a copy."""
        if not self.step:
            return self.numbers[self._places(unit)]
        first = unit * self.step + self.first
        return self.numbers[first : first + self.slots.block_format.block_tokens]

    def _rows(self, units: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        rows = units * self.step + offsets
        return rows + self.first if self.first else rows

    def _places(self, units: Any) -> tuple[Any, Any, Any]:  # noqa: ANN401 - a number or a tensor
        """Return page, slot in the page and layer of units."""
        layers, per_page = self.slots.block_format.layers, self.slots.per_page
        slots = units // layers
        return slots // per_page, slots % per_page, units % layers
