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
Invariant: a tier's pages are those of the manager, which alone says whose a page is; no format is
converted. Cost: a copy is one call per run of neighbouring units, a gather one call per tensor.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvtrie._kvtrie import page_bytes
from kvtrie.errors import ConfigError
from kvtrie.kernels import copy_rows
from kvtrie.layout import Layout
from kvtrie.sizes import check_exists
from kvtrie.tiers.block_format import BlockFormat
from kvtrie.tiers.pool import Pool, all_of_device, paged

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvtrie.resume import ResumePoints
    from kvtrie.shape import ModelShape
    from kvtrie.tier import Tier

__all__ = ["GroupPool", "GroupPools"]


class GroupPool(Pool):
    """The slots of one group in the memory of a tier.

    Args:
        model: the shape whose KV is kept; sizes are those of one rank.
        group: which of its groups.
        block_tokens: tokens of a block.
        memory: uint8, the pages of all groups.
        page: bytes of a page.

    Attributes:
        state: whether a slot is a state instead of KV.

    Raises:
        ConfigError: a state whose bytes do not divide among its layers, or slots at places where
            their numbers cannot be.
    """

    def __init__(
        self, model: ModelShape, group: int, block_tokens: int, memory: torch.Tensor, page: int
    ) -> None:
        one = model.groups[group]
        self.state = one.kind == "state"
        self.layers = len(one.layers)
        self.layer_slots = False
        self.spare = 0
        self._place = None
        self._free = []
        self._memory = memory
        self._slot = model.block_bytes(block_tokens, group)
        self._page, self._per_page = page, page // self._slot
        self.blocks = memory.nbytes // page * self._per_page
        if self._slot % self.layers:
            raise ConfigError(
                f"group {group} has states of {self._slot} bytes for {self.layers} layers: a "
                "multiple wanted"
            )
        if self.state:
            self.block_tokens = block_tokens
            layout = Layout(dtype="uint8", opaque="state")
            self.block_format = BlockFormat(
                self.layers, block_tokens, 1, self._slot // self.layers, 1, layout
            )
            self._row_bytes = (self._slot // self.layers, 0)
        else:
            self.block_tokens = block_tokens // one.tokens_per_row
            heads, key, value, latent, dtype = model.form(group)
            layout = Layout(dtype=dtype, kv="split", latent=latent)
            self.block_format = BlockFormat(
                self.layers, self.block_tokens, heads, key, value, layout
            )
            width = torch.empty(0, dtype=getattr(torch, dtype)).element_size() * heads
            self._row_bytes = (width * key, width * value)
        self.layout = layout
        # The widest rows of memory at which every unit starts, and those of tokens.
        self._wide = math.gcd(page, self.unit_bytes)
        self._narrow = math.gcd(self._wide, *self._row_bytes)
        width = torch.empty(0, dtype=getattr(torch, layout.dtype)).element_size()
        if self._narrow % width:
            raise ConfigError(
                f"slots of {self._slot} bytes of group {group} in pages of {page} bytes do not "
                f"start at multiples of {width} bytes, the size of a {layout.dtype}"
            )
        self.planes = (memory.view(-1, self._wide),)

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
        page, place = divmod(slot, self._per_page)
        start = page * self._page + place * self._slot
        return self._memory[start : start + self._slot]

    def view(self, unit: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of one unit, `(rows, heads, dim)` each, without a copy."""
        slot, layer = divmod(unit, self.layers)
        unit_bytes = self.block(slot)[layer * self.unit_bytes : (layer + 1) * self.unit_bytes]
        fmt, split = self.block_format, self.block_tokens * self._row_bytes[0]
        numbers = getattr(torch, self.layout.dtype)
        keys, values = (part.view(numbers) for part in (unit_bytes[:split], unit_bytes[split:]))
        shape = (self.block_tokens, fmt.heads)
        return keys.view(*shape, fmt.head_dim), values.view(*shape, fmt.v_head_dim)

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
        for at, dim in enumerate((fmt.head_dim, fmt.v_head_dim)):
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
        copy_rows(self.planes[0], self.rows(units), target.planes[0], target.rows(target_units))

    def rows(self, units: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows of the plane that some units have."""
        count = self.unit_bytes // self._wide
        return (self._starts(units)[:, None] + np.arange(count)).reshape(-1)

    def _starts(self, units: NDArray[np.int64]) -> NDArray[np.int64]:
        """The first row of the plane of each unit."""
        slots = units // self.layers
        layers = slots % self._per_page * self.layers + units % self.layers
        inside = layers * (self.unit_bytes // self._wide)
        return slots // self._per_page * (self._page // self._wide) + inside

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
        if self.state:
            raise ConfigError("a state has no rows of tokens")
        return self._memory.view(getattr(torch, self.layout.dtype)).view(
            -1, self._narrow // getattr(torch, self.layout.dtype).itemsize
        )


class GroupPools:
    """The memory of a tier whose bytes all groups share.

    Args:
        model: the shape whose KV is kept; sizes are those of one rank.
        tier: its budget.
        block_tokens: tokens of a block.
        resume: as the manager has it.
        device: device of the memory.
        pinned: whether host memory is locked for copies by a GPU.

    Attributes:
        memory: uint8, all pages.
        groups: the pool of each group.
        model: the shape whose KV is kept.
        block_tokens: tokens of a block.

    Raises:
        ConfigError: a model of one group, a budget that holds no page, a tier in another format or
            with layer slots or `keep`, or more bytes than the device has.
    """

    def __init__(
        self,
        model: ModelShape,
        tier: Tier,
        block_tokens: int,
        resume: ResumePoints,
        *,
        device: torch.device | str = "cpu",
        pinned: bool = False,
    ) -> None:
        odd = [name for name in ("layout", "layer_slots", "keep") if getattr(tier, name)]
        if odd:
            raise ConfigError(
                f"tier {tier.kind!r} has {', '.join(odd)}: groups of layers are kept as they are, "
                "in memory that ends with the process"
            )
        room = resume.room(model, tier, block_tokens)
        page = page_bytes([model.block_bytes(block_tokens, at) for at in range(len(model.groups))])
        if room < page:
            raise ConfigError(f"tier {tier.kind!r} has {room} bytes, a page takes {page}")
        pages = room // page
        device = torch.device(device)
        there = all_of_device(device)
        check_exists(f"a pool of {pages} pages", pages * page, there, f"the memory of {device}")
        self.model, self.block_tokens = model, block_tokens
        self.memory = paged(1, pages * page, device, pinned=pinned).view(-1)
        self.memory.zero_()  # touch every page now; the first copy would pay for it otherwise
        self.groups = tuple(
            GroupPool(model, at, block_tokens, self.memory, page) for at in range(len(model.groups))
        )

    @property
    def device(self) -> torch.device:
        """The device of the memory."""
        return self.memory.device

    def __repr__(self) -> str:
        return f"GroupPools({len(self.groups)} groups, {self.memory.nbytes} bytes)"
