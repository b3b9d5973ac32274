"""Locks: pins of paths held by SGLang's requests, and of windows and states at their ends.

Invariant: a lock releases exactly the blocks it has pinned. A locked block, window or state is
never evicted. Cost: O(log n) per block.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtrie import BlockManager

__all__ = ["Lock", "Locks"]


class Lock:
    """A lock of a path.

    Attributes:
        pins: the manager's pins with their blocks, by group of layers.
    """

    __slots__ = ("pins",)

    def __init__(self) -> None:
        self.pins: dict[int, tuple[int, Sequence[int]]] = {}


class Locks:
    """All locks of a cache.

    Args:
        manager: the manager of the blocks.
    """

    def __init__(self, manager: BlockManager) -> None:
        self._manager = manager
        self._blocks: dict[int, Counter[int]] = {}

    def count(self, group: int) -> int:
        """Return the number of locked blocks of a group of layers."""
        return len(self._blocks.get(group, ()))

    def take(self, parts: dict[int, Sequence[int]]) -> Lock:
        """Lock blocks.

        Args:
            parts: handles of the blocks, by group.
        """
        lock, now = Lock(), time.monotonic_ns()
        for group, blocks in parts.items():
            if blocks:
                pin = self._manager.pin_copies(blocks, "gpu", now=now, group=group)
                lock.pins[group] = pin, blocks
                self._blocks.setdefault(group, Counter()).update(blocks)
        return lock

    def give(self, lock: Lock, group: int | None = None) -> None:
        """Release a lock, or only the blocks of a group."""
        for each in [*lock.pins] if group is None else [group]:
            pin, blocks = lock.pins.pop(each)
            self._manager.unpin_copies(pin, now=time.monotonic_ns())
            locked = self._blocks[each]
            for block in blocks:
                locked[block] -= 1
                if not locked[block]:
                    del locked[block]
