"""Pool: the memory of a tier, divided into units.

A *unit* is a layer of a block. A slot of a whole block consists of `layers` consecutive units. With
layer slots each unit is a separate slot, so any layer of any block may be in any unit, with the
same addressing. A pool may have spare blocks outside the slots, for bytes received layer by layer.
`adopt` then assigns them to a slot.
A pool below the first tier may have a different number format (`Layout.dtype`, `Layout.scales`),
converted by copies between pools.
A model with separate groups of layers has a pool per group in the memory of a tier, and the tier's
pool is the first group's. The unit of a state is its share of the state's bytes, meaningful only to
the model.
Invariant: memory is allocated and touched once and never resized. Bytes are copied only by
`copy_from` and `scatter`. Slots and spare blocks never share memory. Closing releases all memory.
Cost: a copy is a call per run of adjacent units, or a conversion. A gather or scatter is a call per
tensor. `adopt` exchanges two numbers.
"""

from __future__ import annotations

import math
import weakref
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvtrie.errors import ClosedError, ConfigError
from kvtrie.kernels import copy_rows
from kvtrie.settings.sizes import check_exists
from kvtrie.tiers import conversion
from kvtrie.tiers.allocation import all_of_device, give_back, given, paged, pin, unpin
from kvtrie.tiers.block_format import FORMAT
from kvtrie.tiers.group_slots import GroupSlots
from kvtrie.tiers.slot_numbers import SlotNumbers
from kvtrie.tiers.token_rows import TokenRows

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

    from numpy.typing import NDArray

    from kvtrie.kernels import Pages
    from kvtrie.model.layout import Layout
    from kvtrie.model.shape import ModelShape
    from kvtrie.settings.tier import Tier

__all__ = ["Pool"]


class Pool(SlotNumbers):
    """Memory for the KV of `blocks` blocks.

    Args:
        model: the shape of the model, with the sizes of a rank.
        blocks: number of slots of whole blocks.
        block_tokens: tokens of a block.
        layout: layout and number format, or None for kvtrie's own in the model's dtype.
        layer_slots: whether a slot is a single layer of a block.
        device: device of the memory.
        pinned: whether host memory is locked for copies by a GPU.
        spare: blocks of memory beyond the slots.
        memory: uint8, all bytes of the only plane, instead of new memory. Groups share the memory
            of all groups.
        slots: the slots of a group of the model's layers, or None for all layers.
        rest: the pool of the groups after it.

    Attributes:
        groups: the pool of each group of layers, beginning with this pool for the first group.

    Raises:
        ConfigError: a different axis order than kvtrie's, a format without conversion from the
            model's, more bytes than the device has, or invalid numbers.
    """

    _unpin: Callable[[], object] | None = None  # unpins the memory pinned by this pool

    def __init__(
        self,
        model: ModelShape,
        blocks: int,
        block_tokens: int,
        *,
        layout: Layout | None = None,
        layer_slots: bool = False,
        device: torch.device | str = "cpu",
        pinned: bool = False,
        spare: int = 0,
        memory: torch.Tensor | None = None,
        slots: GroupSlots | None = None,
        rest: Self | None = None,
    ) -> None:
        if blocks < 1 or block_tokens < 1:
            raise ConfigError(f"a pool of {blocks} blocks of {block_tokens} tokens holds nothing")
        slots = slots or GroupSlots.of(model, blocks, block_tokens, layout)
        slots.check_memory(model)
        super().__init__(slots, layer_slots=layer_slots, spare=spare)
        self._rest = rest
        self._planes: tuple[torch.Tensor, ...] | None = self._take(memory, device, pinned=pinned)

    def _take(
        self, memory: torch.Tensor | None, device: torch.device | str, *, pinned: bool
    ) -> tuple[torch.Tensor, ...]:
        """Return the planes, in given or new memory."""
        if self.slots.group is None:
            sizes, units = self.block_format.planes(), (self.blocks + self.spare) * self.layers
        else:  # a single plane has K and V of a unit, and all groups
            sizes, units = (self.slots.wide,), self.slots.nbytes // self.slots.wide
        if memory is not None:
            return self._pinned((given(memory, units, sizes),), pinned=pinned)
        # Checked first, because the kernel overcommits memory and kills a process later.
        wanted, available = units * sum(sizes), all_of_device(torch.device(device))
        where = f"the memory of {device}"
        check_exists(f"a pool of {self.blocks} blocks", wanted, available, where)
        planes = tuple(paged(units, size, device) for size in sizes)
        for plane in planes:
            plane.zero_()  # touch every page now, so that the first copy does not
        return self._pinned(planes, pinned=pinned)

    def _pinned(
        self, planes: tuple[torch.Tensor, ...], *, pinned: bool
    ) -> tuple[torch.Tensor, ...]:
        """Return the planes, registered with CUDA for the pool's lifetime if pinned."""
        if pinned:
            end = weakref.finalize(self, unpin, pin(planes))
            end.atexit = False  # CUDA may be gone by then, and the exit releases all memory
            self._unpin = end
        return planes

    @classmethod
    def of_tier(
        cls,
        model: ModelShape,
        tier: Tier,
        block_tokens: int,
        *,
        device: torch.device | str,
        pinned: bool,
        spare: int = 0,
        separate_groups: bool = False,
    ) -> Self:
        """Allocate the memory of a tier, with its budget in blocks or in bytes.

        Args:
            model: the shape of the model.
            tier: its budget, layout and form of slots.
            block_tokens: tokens of a block.
            device: device of the memory.
            pinned: whether host memory is locked for copies by a GPU.
            spare: blocks of memory beyond the tier's budget.
            separate_groups: whether the model's layer groups are separate.

        Raises:
            ConfigError: as for the class, or a budget smaller than a block or page.
        """
        try:
            groups = GroupSlots.of_tier(model, tier, block_tokens, separate_groups=separate_groups)
            for slots in groups:
                slots.check_memory(model)
            pools: list[Self] = []
            for slots in reversed(groups):
                pool = cls(
                    model,
                    slots.blocks,
                    block_tokens,
                    layer_slots=tier.layer_slots,
                    device=device,
                    pinned=pinned and not pools,
                    spare=spare,
                    memory=pools[-1].planes[0].view(-1) if pools else None,
                    slots=slots,
                    rest=pools[-1] if pools else None,
                )
                pools.append(pool)
        except ConfigError as error:
            raise ConfigError(f"tier {tier.kind!r}: {error}") from error
        return pools[-1]

    @property
    def groups(self) -> tuple[Self, ...]:
        """The pool of each group of layers."""
        return (self,) if self._rest is None else (self, *self._rest.groups)

    @property
    def nbytes(self) -> int:
        """Bytes of the slots of all groups."""
        return self.slots.nbytes

    @property
    def planes(self) -> tuple[torch.Tensor, ...]:
        """The bytes, uint8 `(units, bytes per unit)`: a joined tensor, or separate for K and V.

        Raises:
            ClosedError: the pool is closed. Any access to the memory raises it.
        """
        if self._planes is None:
            raise ClosedError(f"the pool of {self.blocks} blocks is closed: open another")
        return self._planes

    def close(self) -> None:
        """Release the memory after its last view is gone. Closing twice does nothing.

        No copy may be in flight: close the executor first.
        """
        if self._rest is not None:
            self._rest.close()
        if not self._planes:
            return
        device = self._planes[0].device
        if self._unpin is not None:
            self._unpin()
        self._planes = None
        for view in ("_tokens", "pages"):
            vars(self).pop(view, None)
        give_back(device)

    @property
    def device(self) -> torch.device:
        """The device of the memory."""
        return self.planes[0].device

    @cached_property
    def _tokens(self) -> tuple[TokenRows, TokenRows]:
        """Rows of K and V."""
        return TokenRows.both(self.slots, self.planes)

    @property
    def keys(self) -> torch.Tensor:
        """K of every token, `(rows, kv_heads, head_dim)` in the model's dtype: a view of `planes`.

        Raises:
            ConfigError: the pool is quantised and holds codes. Read them by `pages`.
        """
        return self._tokens[0].all

    @property
    def values(self) -> torch.Tensor:
        """V as rows, `(rows, kv_heads, v_head_dim)`, in the same memory as `keys` when joined.

        Raises:
            ConfigError: as for `keys`.
        """
        return self._tokens[1].all

    @cached_property
    def pages(self) -> Pages:
        """The memory for kernels: a block is a unit, a slot `unit * block_tokens + offset`.

        Raises:
            ConfigError: only the engine knows the layout of the bytes.
        """
        if self.layout.opaque:
            raise ConfigError(f"only {self.layout.opaque!r} knows what the pool's bytes mean")
        if self.layout.packed:
            raise ConfigError("int4 is read as whole blocks, by a copy into another pool")
        if self.slots.group is not None:
            raise ConfigError("kernels read the pages of one group only: use `view`")
        return conversion.pages(self.block_format, self.planes, len(self.planes[0]))

    @torch.no_grad()
    def gather(
        self,
        units: torch.Tensor,
        offsets: torch.Tensor,
        out: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy K and V of single tokens out of the pool.

        Args:
            units: int64 `(n,)`, the unit of each token at the requested layer.
            offsets: int64 `(n,)`, the token's place in its block.
            out: contiguous K and V to copy to, by default new tensors.

        Returns:
            K `(n, kv_heads, head_dim)` and V `(n, kv_heads, v_head_dim)`, bit for bit.
        """
        keys, values = self._tokens
        out_keys, out_values = out or (None, None)
        return keys.read(units, offsets, out_keys), values.read(units, offsets, out_values)

    @torch.no_grad()
    def scatter(
        self, units: torch.Tensor, offsets: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Write K and V of single tokens.

        Args:
            units: int64 `(n,)`, the unit of each token at the requested layer.
            offsets: int64 `(n,)`, the token's place in its block.
            keys: K `(n, kv_heads, head_dim)` in the model's dtype.
            values: V `(n, kv_heads, v_head_dim)` in the model's dtype.
        """
        key_rows, value_rows = self._tokens
        key_rows.write(units, offsets, keys)
        value_rows.write(units, offsets, values)

    def view(self, unit: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of a unit, `(block_tokens, kv_heads, dim)` each, without a copy."""
        keys, values = self._tokens
        return keys.view(unit), values.view(unit)

    def block(self, slot: int) -> torch.Tensor:
        """Return the block or state at a slot, uint8 `(bytes,)`, as in `layer_bytes`."""
        return self.layer_bytes(slot, (0, self.layers)).view(-1)

    def layer_bytes(self, slot: int, layers: tuple[int, int]) -> torch.Tensor:
        """Return a range of layers of the block at a slot, uint8 `(layers, bytes of one layer)`.

        It is a view of the pool, or a copy of concatenated K and V if they are in two planes.
        """
        if not self.slots.even:
            units = self.units(slot, *layers)
            rows = self.slots.rows(units, self.slots.wide)
            return self.planes[0][int(rows[0]) : int(rows[-1]) + 1].view(len(units), -1)
        first, end = self.unit_range(slot, *layers)
        rows = [plane[first:end] for plane in self.planes]
        return rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)

    def copy_from(
        self, source: Pool, source_units: NDArray[np.int64], units: NDArray[np.int64]
    ) -> None:
        """Copy whole units from another pool (or this pool), without waiting on a GPU.

        A different number format is converted.

        Args:
            source: the pool to read.
            source_units: int64 `(n,)`, units of the source.
            units: int64 `(n,)`, units of this pool, in the same order.

        Raises:
            ConfigError: the pools have different groups, or layouts with more differences than the
                number format.
        """
        if source.slots.group != self.slots.group:
            raise ConfigError("bytes of a group of layers go to a pool of the same group")
        if source.layout != self.layout:
            if source.block_format.differences(self.block_format, but=FORMAT):
                raise ConfigError(f"cannot copy between {source.layout} and {self.layout}")
            source.convert_into(source_units, self, units)
            return
        source.copy_into(source_units, self, units)

    def copy_into(
        self, units: NDArray[np.int64], target: Pool, target_units: NDArray[np.int64]
    ) -> None:
        """Copy whole units into a pool of the same layout without conversion, see `copy_from`.

        Args:
            units: int64 `(n,)`, units of this pool.
            target: the pool to write.
            target_units: int64 `(n,)`, units of the target, in the same order.
        """
        if self.slots.even and target.slots.even:
            for plane, other in zip(self.planes, target.planes, strict=True):
                copy_rows(plane, units, other, target_units)
            return
        # In a tier with a different format, pages have a different size, and so have rows.
        wide = math.gcd(self.slots.wide, target.slots.wide)
        mine, theirs = (pool.planes[0].view(-1, wide) for pool in (self, target))
        copy_rows(mine, self.slots.rows(units, wide), theirs, target.slots.rows(target_units, wide))

    def convert_into(
        self, units: NDArray[np.int64], target: Pool, target_units: NDArray[np.int64]
    ) -> None:
        """Copy whole units into a pool with a different format, see `copy_from`.

        Args:
            units: int64 `(n,)`, units of this pool.
            target: the pool to write.
            target_units: int64 `(n,)`, units of the target, in the same order.
        """
        if self.slots.group is None:
            conversion.convert(self, units, target, target_units)
            return
        most = max(1, conversion.PIECE_BYTES // max(self.unit_bytes, target.unit_bytes))
        for first in range(0, len(units), most):
            piece, target_piece = units[first : first + most], target_units[first : first + most]
            staged_units = np.arange(len(piece))
            source, sink = (
                conversion.Dense.zeros(pool.block_format, len(piece), pool.device)
                for pool in (self, target)
            )
            source.fill(self.lifted(piece))
            conversion.convert(source, staged_units, sink, staged_units)
            target.lower(target_piece, torch.cat(sink.planes, dim=1))

    def lifted(self, units: NDArray[np.int64]) -> torch.Tensor:
        """Return a copy of units of a group, uint8 `(n, bytes per unit)`."""
        made = torch.empty((len(units), self.unit_bytes), dtype=torch.uint8, device=self.device)
        rows = made.view(-1, self.slots.wide)
        copy_rows(
            self.planes[0], self.slots.rows(units, self.slots.wide), rows, np.arange(len(rows))
        )
        return made

    def lower(self, units: NDArray[np.int64], rows: torch.Tensor) -> None:
        """Write units of a group."""
        rows = rows.view(-1, self.slots.wide)
        copy_rows(
            rows, np.arange(len(rows)), self.planes[0], self.slots.rows(units, self.slots.wide)
        )
