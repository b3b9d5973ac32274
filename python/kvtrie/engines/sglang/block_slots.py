"""BlockSlots: the token slots of cached blocks in SGLang's pools.

A block has a page of the full-attention pool until it is evicted. If windows or states have a
separate pool, the block also has a page or slot there for as long as the manager keeps that part.
SGLang's allocator maps full-attention pages to window pages.
Invariant: a page belongs to the tree at most once. Cost: O(1) per block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from kvtrie.engines.sglang.device_pools import FULL
from kvtrie.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any

    from numpy.typing import NDArray

    from kvtrie.engines.sglang.device_pools import DevicePools

__all__ = ["BlockSlots"]


class BlockSlots:
    """Slots by block.

    Args:
        pools: the pools.
        allocator: SGLang's allocator of token slots.
        states: SGLang's allocator of states, None without a pool of states.

    Attributes:
        windows: blocks with a page in the pool of sliding windows.
        states: slots of blocks in the pool of states, `(1,)` each.
    """

    def __init__(
        self,
        pools: DevicePools,
        allocator: Any,  # noqa: ANN401 - of several classes
        states: Any = None,  # noqa: ANN401 - as above
    ) -> None:
        self._pools, self._allocator, self._state_allocator = pools, allocator, states
        # Token slots by row, the row of each block, and rows without a block.
        self._slots = np.empty((pools.blocks, pools.page_size), dtype=np.int64)
        self._rows: dict[int, int] = {}
        self._free = list(range(pools.blocks))
        self.windows: set[int] = set()
        self.states: dict[int, torch.Tensor] = {}

    def count(self, group: int) -> int:
        """Return the number of blocks with slots in a pool."""
        if group == self._pools.windows_at:
            return len(self.windows)
        return len(self.states) if group == self._pools.states_at else len(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def check_room(self, count: int) -> None:
        """Refuse more new pages than there are free rows.

        Raises:
            ConfigError: fewer rows are free.
        """
        if count > len(self._free):
            raise ConfigError(
                f"{count} new pages, {len(self._free)} of {self._pools.blocks} are free"
            )

    def enter(self, blocks: Sequence[int], slots: NDArray[np.int64]) -> None:
        """Give new blocks their pages.

        Args:
            blocks: their handles.
            slots: `(blocks, page_size)`.
        """
        rows = [self._free.pop() for _ in blocks]
        self._slots[rows] = slots
        self._rows.update(zip(blocks, rows, strict=True))

    def of(self, blocks: Iterable[int]) -> torch.Tensor:
        """Return the token slots of blocks, in order, `(blocks * page_size,)`."""
        return self._tensor([self._rows[block] for block in blocks])

    def all(self) -> torch.Tensor:
        """Return the token slots of all blocks, in no order."""
        return self._tensor(list(self._rows.values()))

    def renew(
        self,
        blocks: Sequence[int],
        slots: NDArray[np.int64],
        came: set[int],
        again: tuple[int, int],
        lives: range,
    ) -> None:
        """Take windows from the new slots of a path, and free the slots not needed.

        Args:
            blocks: the path.
            slots: `(blocks, page_size)`, the new slots.
            came: blocks to take a window from these slots.
            again: start and end of the places already in the tree, with different slots.
            lives: the places with a window in these slots.
        """
        self.windows.update(came)
        allocator = self._allocator
        both: list[int] = []
        alone: list[int] = []
        for place in range(*again):
            if blocks[place] in came:
                self._recover(blocks[place], torch.from_numpy(slots[place]))  # pyright: ignore[reportUnknownMemberType] - torch's
                alone.append(place)
            else:
                (both if place in lives or not self._pools.windows else alone).append(place)
        unkept = [place for place in range(max(*again), len(blocks)) if place in lives]
        unkept = [place for place in unkept if blocks[place] not in came]
        frees: list[tuple[list[int], Any]] = [(both, allocator.free_segment)]
        if self._pools.windows:
            frees += [(alone, allocator.free_full_segment), (unkept, allocator.free_swa_segment)]
        for places, free in frees:
            if places:
                free(torch.from_numpy(slots[places].reshape(-1)), start_pos=0)  # pyright: ignore[reportUnknownMemberType] - torch's

    def _recover(self, block: int, slots: torch.Tensor) -> None:
        """Move a window to a block from duplicate slots of the same tokens."""
        mine, allocator = self.of([block]), self._allocator
        window = allocator.translate_loc_from_full_to_swa(slots)
        allocator.clear_full_to_swa_mapping(slots)
        allocator.set_full_to_swa_mapping(mine, window)

    def left(self, events: Sequence[tuple[int, int]]) -> dict[int, int]:
        """Free the pages of blocks or parts of blocks removed from the manager.

        Args:
            events: the group of layers and the block of each removed part.

        Returns:
            Freed pages, by group.
        """
        gone = [block for group, block in events if group == FULL]
        windows = [block for group, block in events if group == self._pools.windows_at]
        windows = [block for block in windows if block in self.windows]
        states = [block for group, block in events if group == self._pools.states_at]
        states = [block for block in states if block in self.states]
        self.windows.difference_update(windows)
        if states:
            self._state_allocator.free(torch.cat([self.states.pop(block) for block in states]))
        leaving, with_windows = set(gone), set(windows)
        tombs = [block for block in windows if block not in leaving]
        if tombs:
            self._allocator.free_swa_segment(self.of(tombs), start_pos=0)
        alone = [block for block in gone if self._pools.windows and block not in with_windows]
        both = [block for block in gone if not self._pools.windows or block in with_windows]
        self._free_rows(both, self._allocator.free_segment)
        if alone:
            self._free_rows(alone, self._allocator.free_full_segment)
        freed = {FULL: len(gone), self._pools.windows_at: len(windows)}
        return freed | {self._pools.states_at: len(states)}

    def _free_rows(self, blocks: Sequence[int], free: Any) -> None:  # noqa: ANN401 - of the allocator
        if not blocks:
            return
        rows = [self._rows.pop(block) for block in blocks]
        free(self._tensor(rows), start_pos=0)
        self._free.extend(rows)

    def _tensor(self, rows: list[int]) -> torch.Tensor:
        return torch.from_numpy(self._slots[rows].reshape(-1))  # pyright: ignore[reportUnknownMemberType] - torch's
