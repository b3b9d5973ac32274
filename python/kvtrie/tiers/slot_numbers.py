"""SlotNumbers: slots of memory, their units, and spare blocks outside the slots.

A *unit* is a layer of a block. A slot of a whole block consists of `layers` consecutive units. With
layer slots each unit is a separate slot. Spare blocks receive bytes layer by layer, and `adopt`
assigns them to a slot.
Invariant: slots and spare blocks never share units.
Cost: `adopt` exchanges two numbers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvtrie.errors import ConfigError, NoSpaceError
from kvtrie.model.group_layout import STATE

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from kvtrie.tiers.group_slots import GroupSlots

__all__ = ["SlotNumbers"]


class SlotNumbers(ABC):
    """The numbers of slots and units of some memory.

    Args:
        slots: the slots with the places of their units.
        layer_slots: whether a slot is a single layer of a block.
        spare: blocks of memory beyond the slots.

    Attributes:
        slots: the slots with the places of their units.
        block_format: format of the bytes.
        layout: layout of a unit.
        state: whether a slot is a state instead of KV.
        layers: units of a block.
        blocks: number of blocks in the slots.
        block_tokens: tokens of a block.
        layer_slots: whether a slot is a single layer of a block instead of the whole block.
        spare: blocks of memory beyond the slots.

    Raises:
        ConfigError: spare blocks with layer slots, or a negative number of spare blocks.
    """

    def __init__(self, slots: GroupSlots, *, layer_slots: bool, spare: int) -> None:
        if spare < 0 or (spare and layer_slots):
            raise ConfigError(
                f"{spare} spare blocks: at least 0 wanted, and 0 where a slot is one layer"
            )
        self.slots, self.block_format = slots, slots.block_format
        self.layout, self.layers = self.block_format.layout, self.block_format.layers
        self.state = self.layout.opaque == STATE
        self.blocks, self.block_tokens = slots.blocks, self.block_format.block_tokens
        self.layer_slots, self.spare = layer_slots, spare
        # Place of each slot's block, in blocks, or None if slots are fixed.
        self._place = np.arange(self.blocks, dtype=np.int64) if spare else None
        self._free = list(range(self.blocks + spare - 1, self.blocks - 1, -1))

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device of the memory."""

    @property
    def unit_bytes(self) -> int:
        """Bytes of a layer of a block, or of the state of a layer."""
        return self.slots.unit_bytes

    def units(self, slot: int, layer_lo: int, layer_hi: int) -> NDArray[np.int64]:
        """Return the units of a range of layers of the block, or of the layer, at a slot.

        Args:
            slot: the slot.
            layer_lo: first layer.
            layer_hi: end of the range.

        Returns:
            int64 `(layer_hi - layer_lo,)`.

        Raises:
            ConfigError: more than a single layer of a layer slot, or a slot beyond the pool.
        """
        return np.arange(*self.unit_range(slot, layer_lo, layer_hi), dtype=np.int64)

    def unit_range(self, slot: int, layer_lo: int, layer_hi: int) -> tuple[int, int]:
        """Return first and end of the contiguous units, with arguments and errors as `units`."""
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
        return first, first + count

    def layer_units(self, slots: NDArray[np.int64], layer: int) -> NDArray[np.int64]:
        """Return the units of a layer of many blocks, or layer slots unchanged.

        Args:
            slots: int64 `(n,)`.
            layer: the layer.

        Returns:
            int64 `(n,)`.

        Raises:
            ConfigError: a slot or a layer is beyond the pool.
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
        """Take spare blocks, all or none.

        Returns:
            Their numbers, for `spare_units`, `adopt` and `put_back`.

        Raises:
            NoSpaceError: the pool has fewer spare blocks.
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
        """Bytes of the spare blocks in use."""
        return (self.spare - len(self._free)) * self.layers * self.unit_bytes

    def put_back(self, spares: Iterable[int]) -> None:
        """Return spare blocks taken by `set_aside`."""
        self._free.extend(spares)

    def spare_units(self, spares: Sequence[int]) -> NDArray[np.int64]:
        """Return the first unit of each spare block, int64 `(n,)`. The next units follow it."""
        return np.asarray(spares, dtype=np.int64) * self.layers

    def adopt(self, slots: NDArray[np.integer], spares: NDArray[np.int64]) -> None:
        """Assign spare blocks to slots. The slots' previous memory becomes spare.

        Args:
            slots: `(n,)`.
            spares: int64 `(n,)`, taken by `set_aside`.

        Raises:
            ConfigError: the pool has no spare blocks.
        """
        if self._place is None:
            raise ConfigError("a pool without spare blocks adopts none")
        had = self._place[slots].tolist()
        self._place[slots] = spares
        self._free.extend(had)

    def arrange(self, places: Iterable[int]) -> None:
        """Assign blocks in spare places to slots without a block, as far as available.

        Args:
            places: the places with a block.
        """
        if self._place is None:
            return
        held = set(places)
        empty = (slot for slot in range(self.blocks) if int(self._place[slot]) not in held)
        for at, spare in enumerate(self._free):
            if spare in held:
                slot = next(empty, None)
                if slot is None:
                    return
                self._free[at], self._place[slot] = int(self._place[slot]), spare

    def slot_of_place(self) -> NDArray[np.int64]:
        """Return the slot of each place, int64 `(blocks + spare,)`, negative for spare places."""
        slots = np.full(self.blocks + self.spare, -1, dtype=np.int64)
        slots[self._place if self._place is not None else slice(None)] = np.arange(self.blocks)
        return slots

    def table(self, slots: NDArray[np.uint32]) -> torch.Tensor:
        """Return the units of a block table, int64 `(layers, blocks)` on the pool's device.

        Args:
            slots: uint32 `(blocks,)`, or `(layers, blocks)` for a pool with layer slots.
        """
        places = slots.astype(np.int64)
        if self._place is not None:
            # A block not on this tier has no place and keeps a number beyond all places.
            places = self._place[np.minimum(places, self.blocks - 1)]
            places[slots >= self.blocks] = slots[slots >= self.blocks]
        table = torch.from_numpy(places).to(self.device)  # type: ignore[no-untyped-call]
        if self.layer_slots:
            return table
        return table * self.layers + torch.arange(self.layers, device=self.device)[:, None]
