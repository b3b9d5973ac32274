"""GroupPools: one tier's memory for a model whose groups of layers are kept apart.

The memory is one run of pages. A group cuts the pages that it has into its own slots, and a slot is
the layers of the group one after another:

```text
memory   | page 0: group 0      | page 1: group 1      | page 2: group 0 ...
          [slot 0][slot 1]...    [slot 1        ]
offset of a slot = slot // slots per page · page bytes + slot % slots per page · slot bytes
```

A layer of a block is a unit, as in a `Pool`: K of its rows, then V. The unit of a state is its
share of the state's bytes, whose meaning only the model knows.
Invariant: a tier's pages are those of the manager, which alone says whose a page is. Cost: a copy
is one call per run of neighbouring units, a gather one call per tensor.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvtrie.errors import ClosedError, ConfigError
from kvtrie.kernels import copy_rows
from kvtrie.model.group_layout import group_bytes
from kvtrie.model.group_pages import GroupPages, slot_start
from kvtrie.model.layout import DTYPE_BYTES
from kvtrie.settings.sizes import check_exists
from kvtrie.tiers import conversion
from kvtrie.tiers.block_format import BlockFormat
from kvtrie.tiers.pool import Pool, all_of_device, paged

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvtrie.kernels import Pages
    from kvtrie.model.shape import ModelShape
    from kvtrie.settings.tier import Tier

__all__ = ["GroupPool", "GroupPools"]


@dataclass(frozen=True)
class GroupUnits:
    """Units of a group one after another, outside a pool, as copies that convert take them.

    Attributes:
        block_format: format of a unit.
        planes: the bytes: K's and V's, or both.
    """

    block_format: BlockFormat
    planes: tuple[torch.Tensor, ...]

    @property
    def device(self) -> torch.device:
        """The device of the memory."""
        return self.planes[0].device

    @cached_property
    def pages(self) -> Pages:
        """All units as blocks of one layer."""
        return conversion.pages(self.block_format, self.planes, len(self.planes[0]))


class GroupPool(Pool):
    """The slots of one group in the memory of a tier.

    Args:
        model: the shape whose KV is kept; sizes are those of one rank.
        group: which of its groups.
        block_tokens: tokens of a block.
        tier: whose memory it is.
        memory: uint8, the pages of all groups.

    Attributes:
        state: whether a slot is a state instead of KV.

    Raises:
        ConfigError: a state whose bytes do not divide among its layers, or slots at places where
            their numbers cannot be.
    """

    def __init__(
        self, model: ModelShape, group: int, block_tokens: int, tier: Tier, memory: torch.Tensor
    ) -> None:
        self.block_format = BlockFormat.of_group(model, group, block_tokens, tier.layout)
        self.layout, self.block_tokens = self.block_format.layout, self.block_format.block_tokens
        self.state = model.groups[group].kind == "state"
        self.layers = self.block_format.layers
        self.layer_slots = False
        self.spare = 0
        self._place = None
        self._free = []
        pages = GroupPages.of(model, tier, block_tokens)
        self._slot = group_bytes(model, block_tokens, tier.layout)[group]
        self._page, self._per_page = pages.page, pages.per_page[group]
        self.blocks = memory.nbytes // self._page * self._per_page
        # The widest rows of memory at which every unit starts.
        self._wide = math.gcd(self._page, self.unit_bytes)
        self._planes = (memory.view(-1, self._wide),)
        # Rows of single tokens are those of plain numbers.
        width = 0 if self.state or tier.layout is not None else DTYPE_BYTES[self.layout.dtype]
        heads, *self._dims, _, _ = model.form(group)
        self._row_bytes = (width * heads * self._dims[0], width * heads * self._dims[1])
        self._narrow = math.gcd(self._wide, *self._row_bytes)
        if width and self._narrow % width:
            raise ConfigError(
                f"slots of {self._slot} bytes of group {group} in pages of {self._page} bytes do "
                f"not start at multiples of {width} bytes, the size of a {self.layout.dtype}"
            )

    @property
    def unit_bytes(self) -> int:
        """Bytes of one layer of a block, or of the state of one layer."""
        return self._slot // self.layers

    def block(self, slot: int) -> torch.Tensor:
        """The bytes of a slot, uint8 `(bytes,)`, without a copy.

        Raises:
            ConfigError: a slot beyond the pool.
        """
        if not 0 <= slot < self.blocks:
            raise ConfigError(f"slot {slot} is outside a pool of {self.blocks} blocks")
        start = slot_start(slot, self._page, self._slot)
        return self._bytes_of_all()[start : start + self._slot]

    def layer_bytes(self, slot: int, layers: tuple[int, int]) -> torch.Tensor:
        """Return some layers of a slot; see `Pool.layer_bytes`."""
        return self.block(slot).view(self.layers, -1)[slice(*layers)]

    def view(self, unit: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of one unit, `(rows, heads, dim)` each, without a copy."""
        slot, layer = divmod(unit, self.layers)
        unit_bytes = self.block(slot)[layer * self.unit_bytes : (layer + 1) * self.unit_bytes]
        fmt, split = self.block_format, self.block_tokens * self._row_bytes[0]
        numbers = getattr(torch, self.layout.dtype)
        keys, values = (part.view(numbers) for part in (unit_bytes[:split], unit_bytes[split:]))
        shape = (self.block_tokens, fmt.heads)
        return keys.view(*shape, self._dims[0]), values.view(*shape, self._dims[1])

    @torch.no_grad()
    def gather(
        self,
        units: torch.Tensor,
        offsets: torch.Tensor,
        out: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy out K and V of single tokens; see `Pool.gather`."""
        found: list[torch.Tensor] = []
        numbers = self._numbers_of_rows()
        fmt = self.block_format
        for at, dim in enumerate(self._dims):
            cells = self._cells(units, offsets, at)
            rows = torch.index_select(numbers, 0, cells.flatten())
            found.append(rows.view(len(units), fmt.heads, dim))
        if out is None:
            return found[0], found[1]
        for mine, given in zip(found, out, strict=True):
            given.copy_(mine)
        return out

    @torch.no_grad()
    def scatter(
        self, units: torch.Tensor, offsets: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Write K and V of single tokens; see `Pool.scatter`."""
        numbers = self._numbers_of_rows()
        for at, given in enumerate((keys, values)):
            cells = self._cells(units, offsets, at)
            numbers.index_copy_(0, cells.flatten(), given.reshape(-1, numbers.shape[1]))

    def copy_into(
        self, units: NDArray[np.int64], target: Pool, target_units: NDArray[np.int64]
    ) -> None:
        """Copy whole units into a pool of the same group, as they are; see `Pool.copy_from`.

        Raises:
            ConfigError: another group's pool.
        """
        if not isinstance(target, GroupPool) or target.block_format != self.block_format:
            raise ConfigError("bytes of a group of layers go to a pool of the same group")
        # Pages of a tier in another format have another size, and so have rows.
        wide = math.gcd(self._wide, target.planes[0].shape[1])
        mine, theirs = (pool.planes[0].view(-1, wide) for pool in (self, target))
        copy_rows(mine, self.rows(units, wide), theirs, target.rows(target_units, wide))

    def convert_into(
        self, units: NDArray[np.int64], target: Pool, target_units: NDArray[np.int64]
    ) -> None:
        """Copy whole units into a pool of the same group in another format; see `Pool.copy_from`.

        Raises:
            ConfigError: a pool of all layers.
        """
        if not isinstance(target, GroupPool):
            raise ConfigError("bytes of a group of layers go to a pool of the same group")
        most = max(1, conversion.PIECE_BYTES // max(self.unit_bytes, target.unit_bytes))
        for first in range(0, len(units), most):
            here, there = units[first : first + most], target_units[first : first + most]
            source, sink = self.aside(len(here)), target.aside(len(there))
            rows = torch.empty(len(here), self.unit_bytes, dtype=torch.uint8, device=self.device)
            flat = rows.view(-1, self._wide)
            copy_rows(self.planes[0], self.rows(here), flat, np.arange(len(flat)))
            start = 0
            for plane in source.planes:
                plane.copy_(rows[:, start : start + plane.shape[1]])
                start += plane.shape[1]
            near = np.arange(len(here))
            conversion.convert(source, near, sink, near)
            flat = torch.cat(sink.planes, dim=1).view(-1, target.planes[0].shape[1])
            copy_rows(flat, np.arange(len(flat)), target.planes[0], target.rows(there))

    def aside(self, units: int) -> GroupUnits:
        """Return room for some units outside the pool, of zeros."""
        sizes = self.block_format.planes()
        planes = [torch.zeros((units, size), dtype=torch.uint8) for size in sizes]
        return GroupUnits(self.block_format, tuple(plane.to(self.device) for plane in planes))

    def rows(self, units: NDArray[np.int64], wide: int = 0) -> NDArray[np.int64]:
        """Rows that some units have in the plane, or in one with rows of `wide` bytes."""
        wide = wide or self._wide
        count = self.unit_bytes // wide
        return (self._starts(units, wide)[:, None] + np.arange(count)).reshape(-1)

    def _starts(self, units: NDArray[np.int64], wide: int) -> NDArray[np.int64]:
        """The first row of each unit, of rows of `wide` bytes."""
        slots = units // self.layers
        layers = slots % self._per_page * self.layers + units % self.layers
        inside = layers * (self.unit_bytes // wide)
        return slots // self._per_page * (self._page // wide) + inside

    def _cells(self, units: torch.Tensor, offsets: torch.Tensor, part: int) -> torch.Tensor:
        """Narrow rows of memory that hold K (0) or V (1) of single tokens, `(n, cells)`."""
        slots = units // self.layers
        layers = slots % self._per_page * self.layers + units % self.layers
        start = slots // self._per_page * self._page + layers * self.unit_bytes
        start = start + part * self.block_tokens * self._row_bytes[0]
        start = start + offsets * self._row_bytes[part]
        count = self._row_bytes[part] // self._narrow
        return (start // self._narrow)[:, None] + torch.arange(count, device=units.device)

    def _numbers_of_rows(self) -> torch.Tensor:
        if not any(self._row_bytes):
            raise ConfigError("a state or a block in another format has no rows of tokens")
        numbers = getattr(torch, self.layout.dtype)
        rows = self._bytes_of_all().view(numbers)
        return rows.view(-1, self._narrow // numbers.itemsize)

    def _bytes_of_all(self) -> torch.Tensor:
        """All pages of the tier, uint8."""
        return self.planes[0].view(-1)


class GroupPools:
    """The memory of a tier whose bytes all groups share.

    Args:
        model: the shape whose KV is kept; sizes are those of one rank.
        tier: its budget.
        block_tokens: tokens of a block.
        device: device of the memory.
        pinned: whether host memory is locked for copies by a GPU.
        memory: uint8, all pages, if they are in a file that the next process finds.

    Attributes:
        groups: the pool of each group.
        model: the shape whose KV is kept.
        block_tokens: tokens of a block.
        nbytes: bytes of all pages.

    Raises:
        ConfigError: a budget that holds no page, a tier with layer slots, a layout that groups
            cannot have, or more bytes than the device has.
    """

    def __init__(
        self,
        model: ModelShape,
        tier: Tier,
        block_tokens: int,
        *,
        device: torch.device | str = "cpu",
        pinned: bool = False,
        memory: torch.Tensor | None = None,
    ) -> None:
        if tier.layer_slots:
            raise ConfigError(
                f"tier {tier.kind!r} has layer_slots: groups of layers are kept in slots of whole "
                "blocks"
            )
        pages = GroupPages.of(model, tier, block_tokens)
        if not pages.count:
            raise ConfigError(
                f"tier {tier.kind!r} has {pages.bytes} bytes, a page takes {pages.page}"
            )
        for group, one in enumerate(model.groups):
            if tier.layout is not None and one.kind != "state":
                plain = BlockFormat.of_group(model, group, block_tokens, None)
                conversion.check(
                    plain, BlockFormat.of_group(model, group, block_tokens, tier.layout)
                )
        device, wanted = torch.device(device), pages.count * pages.page
        self.model, self.block_tokens = model, block_tokens
        if memory is None:
            there = all_of_device(device)
            check_exists(f"a pool of {pages.count} pages", wanted, there, f"the memory of {device}")
            memory = paged(1, wanted, device, pinned=pinned).view(-1)
            memory.zero_()  # touch every page now; the first copy would pay for it otherwise
        self._memory: torch.Tensor | None = memory
        self.nbytes = memory.nbytes
        self.groups: tuple[GroupPool, ...] = tuple(
            GroupPool(model, at, block_tokens, tier, memory) for at in range(len(model.groups))
        )

    @property
    def memory(self) -> torch.Tensor:
        """All pages, uint8.

        Raises:
            ClosedError: the pools are closed.
        """
        if self._memory is None:
            raise ClosedError(f"the pools of {len(self.groups)} groups are closed: open others")
        return self._memory

    @property
    def device(self) -> torch.device:
        """The device of the memory."""
        return self.memory.device

    def close(self) -> None:
        """Give the memory back; see `Pool.close`. Closing twice does nothing."""
        self._memory = None
        with ExitStack() as closing:
            for pool in self.groups:
                closing.callback(pool.close)

    def __repr__(self) -> str:
        return f"GroupPools({len(self.groups)} groups, {self.nbytes} bytes)"
