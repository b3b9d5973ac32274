"""TokenRows: K or V of single tokens in the memory of a pool.

The memory is rows of one size, such that each token is one row or, where the pages of a group start
between such rows, several of a narrower size. Invariant: rows are views of the memory. Cost: one
call per read or write.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvtrie.errors import ConfigError
from kvtrie.model.layout import DTYPE_BYTES

if TYPE_CHECKING:
    from typing import Self

    from kvtrie.tiers.group_slots import GroupSlots

__all__ = ["TokenRows"]


@dataclass(frozen=True, slots=True)
class TokenRows:
    """K or V of all tokens.

    Attributes:
        slots: where units are.
        numbers: the memory, `(rows, heads, dim)` where a token is one row, else `(rows, numbers)`.
        dim: numbers per head.
        of_token: rows of a token.
        of_unit: rows from unit to unit; 0 where a page has a rest after its last unit.
        first: rows of a unit before its first token.
    """

    slots: GroupSlots
    numbers: torch.Tensor
    dim: int
    of_token: int
    of_unit: int
    first: int

    @classmethod
    def both(cls, slots: GroupSlots, planes: tuple[torch.Tensor, ...]) -> tuple[Self, Self]:
        """Return K and V of a pool.

        Args:
            slots: where units are.
            planes: the bytes, uint8 `(rows, bytes)`: one tensor, or K's and V's where split.

        Raises:
            ConfigError: numbers that are not those of the model, or only known to an engine.
        """
        fmt, layout = slots.block_format, slots.block_format.layout
        if layout.opaque:
            raise ConfigError(f"only {layout.opaque!r} knows what the pool's bytes mean")
        if layout.scales != "none":
            raise ConfigError(
                f"the pool holds codes of {layout.dtype} with scales by {layout.scales!r}, and no "
                "rows of tokens: read it through `pages`, or int4 by a copy"
            )
        # A group keeps a latent row once, and V has no numbers there.
        v_dim = 0 if layout.latent and slots.group is not None else fmt.v_head_dim
        v_first = 0 if layout.latent or len(planes) > 1 else fmt.block_tokens * fmt.head_dim
        return cls._of(slots, planes[0], fmt.head_dim, 0), cls._of(
            slots, planes[-1], v_dim, v_first
        )

    @classmethod
    def _of(cls, slots: GroupSlots, plane: torch.Tensor, dim: int, first: int) -> Self:
        """The rows of numbers of `dim` per head, of which the first are `first` per head."""
        fmt = slots.block_format
        width = DTYPE_BYTES[fmt.layout.dtype] * fmt.heads
        size, first = width * dim, width * first
        row = math.gcd(plane.shape[1], size, first)
        numbers = plane.view(-1).view(getattr(torch, fmt.layout.dtype))
        shape = (fmt.heads, dim) if row == size else (row // numbers.itemsize,)
        of_unit = plane.shape[1] // row if slots.even else 0
        return cls(slots, numbers.view(-1, *shape), dim, size // row, of_unit, first // row)

    @property
    def whole(self) -> torch.Tensor:
        """All tokens, `(rows, heads, dim)`: a view of the memory.

        Raises:
            ConfigError: a token that is not one row.
        """
        if self.of_token != 1:
            raise ConfigError("slots of this group start between rows of tokens: use `view`")
        return self.numbers

    def read(
        self, units: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor | None
    ) -> torch.Tensor:
        """Copy out tokens, `(n, heads, dim)`; see `Pool.gather`."""
        places = self._places(units, offsets)
        if self.of_token == 1:
            return torch.index_select(self.numbers, 0, places, out=out)
        found = torch.index_select(self.numbers, 0, self._rows(places))
        found = found.view(len(units), self.slots.block_format.heads, self.dim)
        return found if out is None else out.copy_(found)

    def write(self, units: torch.Tensor, offsets: torch.Tensor, tokens: torch.Tensor) -> None:
        """Write tokens, `(n, heads, dim)`; see `Pool.scatter`."""
        places = self._places(units, offsets)
        if self.of_token == 1:
            self.numbers.index_copy_(0, places, tokens)
        else:
            rows = tokens.reshape(-1, self.numbers.shape[1])
            self.numbers.index_copy_(0, self._rows(places), rows)

    def view(self, unit: int) -> torch.Tensor:
        """Return the tokens of one unit, `(block_tokens, heads, dim)`, without a copy."""
        fmt, first = self.slots.block_format, self._places(unit, 0)
        rows = self.numbers[first : first + fmt.block_tokens * self.of_token]
        return rows if self.of_token == 1 else rows.view(fmt.block_tokens, fmt.heads, self.dim)

    def _places(self, units: Any, offsets: Any) -> Any:  # noqa: ANN401 - numbers or tensors
        """The first row of tokens of units."""
        rows = units * self.of_unit if self.of_unit else self.slots.starts(units, self._bytes)
        rows = rows + (offsets if self.of_token == 1 else offsets * self.of_token)
        return rows + self.first if self.first else rows

    @property
    def _bytes(self) -> int:
        """Bytes of a row."""
        return self.numbers[:1].nbytes

    def _rows(self, places: torch.Tensor) -> torch.Tensor:
        """All rows of tokens."""
        each = torch.arange(self.of_token, device=places.device)
        return (places[:, None] + each).flatten()
