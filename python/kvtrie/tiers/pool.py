"""Pool: one tier's memory, cut into units.

A *unit* is one layer of one block. A slot that holds whole blocks is `layers` consecutive units;
with layer slots each unit is a separate slot, so both forms are addressed the same way and any
layer of any block may sit in any unit of the second. A pool may have spare blocks, which no slot
has: bytes that come layer by layer wait there, and `adopt` makes them those of a slot.
A pool below the first tier may keep KV in a different format (`Layout.dtype`, `Layout.scales`):
copies between pools convert then.
Invariant: allocated and touched once, never resized; bytes move only by `copy_from` and `scatter`;
slots and spare blocks never share memory; closing gives all of it back.
Cost: a copy is one call per run of neighbouring units, or what `conversion` says; a gather or
scatter one call per tensor; `adopt` exchanges two numbers.
"""

from __future__ import annotations

import math
import mmap
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from kvtrie.errors import ClosedError, ConfigError, NoSpaceError
from kvtrie.kernels import copy_rows
from kvtrie.model.layout import DTYPE_BYTES, Layout
from kvtrie.settings.sizes import all_memory, check_exists
from kvtrie.tiers import conversion
from kvtrie.tiers.block_format import FORMAT, BlockFormat

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from kvtrie.kernels import Pages
    from kvtrie.model.shape import ModelShape
    from kvtrie.settings.tier import Tier

__all__ = ["Pool", "all_of_device", "give_back", "paged"]

_PAGE = 4096


class Pool:
    """Memory for the KV of `blocks` blocks.

    Args:
        model: the shape whose KV is kept; sizes are those of one rank.
        blocks: number of slots of whole blocks.
        block_tokens: tokens of a block.
        layout: layout and number format; None is kvtrie's own, in the model's dtype.
        layer_slots: whether a slot is one layer of a block.
        device: device of the memory.
        pinned: whether host memory is locked for copies by a GPU.
        spare: blocks of memory beyond those of the slots.
        memory: uint8, all bytes of the one plane, to use instead of new memory.

    Attributes:
        block_format: format of the bytes.
        layers: layers of the model.
        layer_slots: whether a slot is one layer of a block instead of the whole block.
        spare: blocks of memory beyond those of the slots.

    Raises:
        ConfigError: an order of axes other than kvtrie's own, a format that KV of the model cannot
            be converted to, more bytes than the device has, or numbers that cannot be.
    """

    _planes: tuple[torch.Tensor, ...] | None
    _registered: torch.Tensor | None = None  # given memory that this pool has pinned

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
    ) -> None:
        if blocks < 1 or block_tokens < 1:
            raise ConfigError(f"a pool of {blocks} blocks of {block_tokens} tokens holds nothing")
        if spare < 0 or (spare and layer_slots):
            raise ConfigError(
                f"{spare} spare blocks: at least 0 wanted, and 0 where a slot is one layer"
            )
        block_format = BlockFormat.of(model, layout, block_tokens)
        layout = block_format.layout
        if layout.order != Layout().order or layout.strides is not None:
            raise ConfigError(f"pools keep the order {Layout().order}, not {layout.order}")
        plain = replace(layout, dtype=model.dtype, scales="none")
        if layout != plain:
            conversion.check(BlockFormat.of(model, plain, block_tokens), block_format)
        self.block_format = block_format
        self.layout = layout
        self.layers = model.layers
        self.blocks = blocks
        self.block_tokens = block_tokens
        self.layer_slots = layer_slots
        self.spare = spare
        # Place of each slot's block, in blocks; None if no slot can move.
        self._place = np.arange(blocks, dtype=np.int64) if spare else None
        self._free = list(range(blocks + spare - 1, blocks - 1, -1))
        sizes, units = block_format.planes(), (blocks + spare) * model.layers
        if memory is None:
            # Asked first: the kernel promises more memory than there is, and ends a process later.
            wanted, there = units * sum(sizes), all_of_device(torch.device(device))
            check_exists(f"a pool of {blocks} blocks", wanted, there, f"the memory of {device}")
            planes = tuple(paged(units, size, device, pinned=pinned) for size in sizes)
            for plane in planes:
                plane.zero_()  # touch every page now; the first copy would pay for it otherwise
        else:
            planes = (_given(memory, units, sizes, pinned=pinned),)
            self._registered = planes[0] if pinned else None
        self._planes = planes
        self._unit_bytes = sum(plane.shape[1] for plane in planes)
        if not layout.packed:  # int4 has no rows of single tokens
            width = DTYPE_BYTES[layout.dtype] * block_format.heads
            self._key_rows = sizes[0] // (width * block_format.head_dim)
            self._value_rows = sizes[-1] // (width * block_format.v_head_dim)
        self._value_shift = 0 if layout.latent or layout.kv == "split" else block_tokens

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
    ) -> Pool:
        """Allocate the memory that a tier asks for, its budget given in blocks or in bytes.

        Args:
            model: the shape whose KV is kept.
            tier: its budget, layout and form of slots.
            block_tokens: tokens of a block.
            device: device of the memory.
            pinned: whether host memory is locked for copies by a GPU.
            spare: blocks of memory beyond the tier's budget.

        Raises:
            ConfigError: as of the class, or a budget that holds no block.
        """
        try:
            return cls(
                model,
                tier.room(model, block_tokens),
                block_tokens,
                layout=tier.layout,
                layer_slots=tier.layer_slots,
                device=device,
                pinned=pinned,
                spare=spare,
            )
        except ConfigError as error:
            raise ConfigError(f"tier {tier.kind!r}: {error}") from error

    @property
    def planes(self) -> tuple[torch.Tensor, ...]:
        """The bytes, uint8 `(units, bytes per unit)`: one tensor, or K's and V's where split.

        Raises:
            ClosedError: the pool is closed, as of all that reads or writes memory.
        """
        if self._planes is None:
            raise ClosedError(f"the pool of {self.blocks} blocks is closed: open another")
        return self._planes

    def close(self) -> None:
        """Give the memory back, once no view of it is left. Closing twice does nothing.

        No copy may be under way: close the executor first.
        """
        if not self._planes:
            return
        device, pinned = self._planes[0].device, self._planes[0].is_pinned()
        if self._registered is not None:
            runtime = cast("Any", torch.cuda.cudart())
            runtime.cudaHostUnregister(self._registered.data_ptr())
        self._planes = self._registered = None
        for view in ("keys", "values", "pages"):
            vars(self).pop(view, None)
        give_back(device, pinned=pinned)

    @property
    def unit_bytes(self) -> int:
        """Bytes of one layer of a block, also once the pool is closed."""
        return self._unit_bytes

    @property
    def device(self) -> torch.device:
        """The device of the memory."""
        return self.planes[0].device

    @cached_property
    def keys(self) -> torch.Tensor:
        """K of every token, `(rows, kv_heads, head_dim)` in the model's dtype: a view of `planes`.

        Raises:
            ConfigError: a quantised pool, which holds codes; `pages` reads them.
        """
        return self._numbers(self.planes[0], self.block_format.heads, self.block_format.head_dim)

    @cached_property
    def values(self) -> torch.Tensor:
        """V as rows, `(rows, kv_heads, v_head_dim)`; the same memory as `keys` when joined.

        Raises:
            ConfigError: as `keys`.
        """
        return self._numbers(self.planes[-1], self.block_format.heads, self.block_format.v_head_dim)

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
        return conversion.pages(self.block_format, self.planes, len(self.planes[0]))

    def units(self, slot: int, layer_lo: int, layer_hi: int) -> NDArray[np.int64]:
        """Return the units of some layers of the block, or of the one layer, at a slot.

        Args:
            slot: the slot.
            layer_lo: first layer.
            layer_hi: the last layer plus 1.

        Returns:
            int64 `(layer_hi - layer_lo,)`.

        Raises:
            ConfigError: more than one layer asked of a layer slot, or a slot beyond the pool.
        """
        if self.layer_slots:
            if layer_hi - layer_lo != 1:
                raise ConfigError(f"layer slot {slot} holds one layer, not {layer_lo}:{layer_hi}")
            first, count = slot, 1
        else:
            first, count = slot * self.layers + layer_lo, layer_hi - layer_lo
        if not 0 <= first <= first + count <= self.blocks * self.layers:
            raise ConfigError(f"slot {slot} is outside a pool of {self.blocks} blocks")
        if self._place is not None:
            first = int(self._place[slot]) * self.layers + layer_lo
        return np.arange(first, first + count, dtype=np.int64)

    def layer_units(self, slots: NDArray[np.int64], layer: int) -> NDArray[np.int64]:
        """Return the units of one layer of many blocks; of layer slots, the slots themselves.

        Args:
            slots: int64 `(n,)`.
            layer: the layer.

        Returns:
            int64 `(n,)`.

        Raises:
            ConfigError: a slot or a layer beyond the pool.
        """
        most = self.blocks * (self.layers if self.layer_slots else 1)
        if len(slots) and not 0 <= slots.min() <= slots.max() < most:
            raise ConfigError(f"slots {slots.min()} to {slots.max()}, 0 to {most - 1} wanted")
        if not 0 <= layer < self.layers:
            raise ConfigError(f"layer {layer}, 0 to {self.layers - 1} wanted")
        if self.layer_slots:
            return slots
        return (slots if self._place is None else self._place[slots]) * self.layers + layer

    def set_aside(self, blocks: int) -> list[int]:
        """Take spare blocks: all of them, or none.

        Returns:
            Their numbers, for `spare_units`, `adopt` and `put_back`.

        Raises:
            NoSpaceError: fewer are spare.
        """
        if blocks > len(self._free):
            used = self.spare - len(self._free)
            raise NoSpaceError(
                f"{blocks} spare blocks wanted, {len(self._free)} of {self.spare} are free: wait "
                "for what is being stored, or open the pools with more",
                tier="staging",
                wanted=blocks,
                free=len(self._free),
                coming=0,
                leased=used,
            )
        first = len(self._free) - blocks
        taken = self._free[first:]
        del self._free[first:]
        return taken

    @property
    def staged_bytes(self) -> int:
        """Bytes of the spare blocks that are set aside."""
        return (self.spare - len(self._free)) * self.layers * self.unit_bytes

    def put_back(self, spares: Iterable[int]) -> None:
        """Give spare blocks back that `set_aside` gave."""
        self._free.extend(spares)

    def spare_units(self, spares: Sequence[int]) -> NDArray[np.int64]:
        """Return the units of the first layer of spare blocks, int64 `(n,)`; the others follow."""
        return np.asarray(spares, dtype=np.int64) * self.layers

    def adopt(self, slots: NDArray[np.integer], spares: NDArray[np.int64]) -> None:
        """Make the bytes of spare blocks those of slots; the slots' former memory is spare then.

        Args:
            slots: `(n,)`.
            spares: int64 `(n,)`, as `set_aside` gave them.

        Raises:
            ConfigError: the pool has no spare blocks.
        """
        if self._place is None:
            raise ConfigError("a pool without spare blocks adopts none")
        had = self._place[slots].tolist()
        self._place[slots] = spares
        self._free.extend(had)

    def table(self, slots: NDArray[np.uint32]) -> torch.Tensor:
        """Return the units of a block table, int64 `(layers, blocks)` on the pool's device.

        Args:
            slots: uint32 `(blocks,)`, or `(layers, blocks)` where the pool has layer slots.
        """
        places = slots.astype(np.int64)
        if self._place is not None:
            # A block that is not on this tier has no place: it keeps a number beyond all of them.
            places = self._place[np.minimum(places, self.blocks - 1)]
            places[slots >= self.blocks] = slots[slots >= self.blocks]
        table = torch.from_numpy(places).to(self.device)  # type: ignore[no-untyped-call]
        if self.layer_slots:
            return table
        return table * self.layers + torch.arange(self.layers, device=self.device)[:, None]

    @torch.no_grad()
    def gather(
        self,
        units: torch.Tensor,
        offsets: torch.Tensor,
        out: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy out K and V of single tokens.

        Args:
            units: int64 `(n,)`, the unit of each token at the wanted layer.
            offsets: int64 `(n,)`, the token's place in its block.
            out: K and V to copy to, contiguous; new ones by default.

        Returns:
            K `(n, kv_heads, head_dim)` and V `(n, kv_heads, v_head_dim)`, bit for bit.
        """
        keys, values = out or (None, None)
        keys = torch.index_select(self.keys, 0, units * self._key_rows + offsets, out=keys)
        shifted = units * self._value_rows + offsets + self._value_shift
        return keys, torch.index_select(self.values, 0, shifted, out=values)

    @torch.no_grad()
    def scatter(
        self, units: torch.Tensor, offsets: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Write K and V of single tokens.

        Args:
            units: int64 `(n,)`, the unit of each token at the wanted layer.
            offsets: int64 `(n,)`, the token's place in its block.
            keys: K `(n, kv_heads, head_dim)` in the model's dtype.
            values: V `(n, kv_heads, v_head_dim)` in the model's dtype.
        """
        self.keys.index_copy_(0, units * self._key_rows + offsets, keys)
        shifted = units * self._value_rows + offsets + self._value_shift
        self.values.index_copy_(0, shifted, values)

    def view(self, unit: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of one unit, `(block_tokens, kv_heads, dim)` each, without a copy."""
        key, value = unit * self._key_rows, unit * self._value_rows + self._value_shift
        return (
            self.keys[key : key + self.block_tokens],
            self.values[value : value + self.block_tokens],
        )

    def layer_bytes(self, slot: int, layers: tuple[int, int]) -> torch.Tensor:
        """Return some layers of the block at a slot, uint8 `(layers, bytes of one layer)`.

        It is the pool's memory, or a copy of K's and V's side by side where these are two planes.
        """
        units = self.units(slot, *layers)
        rows = [plane[int(units[0]) : int(units[-1]) + 1] for plane in self.planes]
        return rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)

    def copy_from(
        self, source: Pool, source_units: NDArray[np.int64], units: NDArray[np.int64]
    ) -> None:
        """Copy whole units from another pool (or this one); on a GPU without waiting.

        Numbers in another format are converted.

        Args:
            source: the other pool.
            source_units: int64 `(n,)`, units of that pool.
            units: int64 `(n,)`, units of this one, in the same order.

        Raises:
            ConfigError: pools whose layouts differ in more than the format.
        """
        if source.layout != self.layout:
            if source.block_format.differences(self.block_format, but=FORMAT):
                raise ConfigError(f"cannot copy between {source.layout} and {self.layout}")
            source.convert_into(source_units, self, units)
            return
        source.copy_into(source_units, self, units)

    def copy_into(
        self, units: NDArray[np.int64], target: Pool, target_units: NDArray[np.int64]
    ) -> None:
        """Copy whole units into a pool of the same layout, as they are; see `copy_from`.

        Args:
            units: int64 `(n,)`, units of this pool.
            target: the other pool.
            target_units: int64 `(n,)`, units of that pool, in the same order.
        """
        for plane, other in zip(self.planes, target.planes, strict=True):
            copy_rows(plane, units, other, target_units)

    def convert_into(
        self, units: NDArray[np.int64], target: Pool, target_units: NDArray[np.int64]
    ) -> None:
        """Copy whole units into a pool of another format; see `copy_from`.

        Args:
            units: int64 `(n,)`, units of this pool.
            target: the other pool.
            target_units: int64 `(n,)`, units of that pool, in the same order.
        """
        conversion.convert(self, units, target, target_units)

    def _numbers(self, plane: torch.Tensor, heads: int, dim: int) -> torch.Tensor:
        if self.layout.opaque:
            raise ConfigError(f"only {self.layout.opaque!r} knows what the pool's bytes mean")
        if self.layout.scales != "none":
            raise ConfigError(
                f"the pool holds codes of {self.layout.dtype} with scales by "
                f"{self.layout.scales!r}: read it through `pages`, or int4 by a copy"
            )
        rows = plane.view(getattr(torch, self.layout.dtype))
        return rows.view(math.prod(rows.shape) // (heads * dim), heads, dim)


def _given(
    memory: torch.Tensor, units: int, sizes: tuple[int, ...], *, pinned: bool
) -> torch.Tensor:
    """Memory that is there already, as the one plane of a pool."""
    wanted = units * sum(sizes)
    if len(sizes) != 1 or memory.nbytes != wanted or memory.dtype != torch.uint8:
        raise ConfigError(
            f"memory of {memory.nbytes} bytes of {memory.dtype} for a pool: one plane of {wanted} "
            f"bytes of {torch.uint8} wanted, and the layout has {len(sizes)}"
        )
    if pinned:
        runtime = cast("Any", torch.cuda.cudart())
        status = runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
        if int(status):
            raise ConfigError(f"{memory.nbytes} bytes of given memory cannot be pinned: {status}")
    return memory.view(units, sizes[0])


def all_of_device(device: torch.device) -> int:
    """Bytes of a device's memory, taken or not; 0 where that is not known."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return all_memory() if device.type == "cpu" else 0


def give_back(device: torch.device, *, pinned: bool) -> None:
    """Let the system have what torch keeps of memory that was freed."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if pinned:
        vars(vars(torch)["_C"])["_host_emptyCache"]()  # torch has no public name for it


def paged(units: int, size: int, device: torch.device | str, *, pinned: bool) -> torch.Tensor:
    """Memory of `units` times `size` bytes that starts on a page, as direct I/O wants it.

    Raises:
        ConfigError: the system does not give as much.
    """
    length = units * size
    try:
        return _paged(units, size, device, pinned=pinned)
    except (OSError, ValueError, OverflowError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        raise ConfigError(
            f"{length} bytes of memory on {device} for {units} slots of {size} bytes: {reason}; "
            "give less, or raise the limit of the process (`ulimit -v`)"
        ) from error


def _paged(units: int, size: int, device: torch.device | str, *, pinned: bool) -> torch.Tensor:
    length = units * size
    if torch.device(device).type == "cpu" and not pinned:
        # Large pages at least halve the address ranges that a device has to look up.
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        memory = mmap.mmap(-1, length, flags=private)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without them
                memory.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(memory, dtype=torch.uint8).view(units, size)
    whole = torch.empty(length + _PAGE, dtype=torch.uint8, device=device, pin_memory=pinned)
    start = -whole.data_ptr() % _PAGE
    return whole[start : start + length].view(units, size)
