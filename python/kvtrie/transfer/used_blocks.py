"""UsedBlocks: tracks block uses not yet written to the disk tier's files.

After a kill, a new process finds its blocks with the last written ages, and evicts the oldest age
first. So uses are written periodically.
Invariant: at most `most` handles wait. Beyond that the oldest uses are dropped, because their
blocks are evicted next anyway.
Cost: an array per use, and a row per block on disk, at most `at_once` per step.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from kvtrie import Index

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvtrie import BlockManager

__all__ = ["UsedBlocks"]

_PERIOD_NS = 5_000_000_000


class UsedBlocks:
    """Blocks used since their last use was written.

    Args:
        manager: the manager of the blocks.
        tier: the tier of the files; None ignores all uses.
        most: maximum number of waiting handles.
        at_once: maximum number of handles per step.
    """

    def __init__(
        self, manager: BlockManager, tier: int | None, *, most: int = 1 << 16, at_once: int = 256
    ) -> None:
        self._manager, self._tier = manager, tier
        self._most, self._at_once = most, at_once
        self._waiting: deque[NDArray[np.uint64]] = deque()
        self._count = 0
        self._next_ns = 0

    def __len__(self) -> int:
        """The number of waiting handles. A block used twice counts twice."""
        return self._count

    def use(self, handles: NDArray[np.uint64]) -> None:
        """Record a use of blocks."""
        if self._tier is None or not len(handles):
            return
        self._waiting.append(handles)
        self._count += len(handles)
        while self._count > self._most:
            self._count -= len(self._waiting.popleft())

    def take(self, now: int, *, idle: bool) -> Index:
        """Return the index of waiting blocks with current ages; empty within 5 s of the last write.

        Args:
            now: the time.
            idle: ignore the 5 s between two writes, because the next call may come much later.
        """
        if not self._count or self._tier is None or (now < self._next_ns and not idle):
            return Index()
        taken: list[NDArray[np.uint64]] = []
        room = self._at_once
        while room and self._waiting:
            first = self._waiting.popleft()
            if len(first) > room:
                self._waiting.appendleft(first[room:])
            taken.append(first[:room])
            room -= len(taken[-1])
        self._count -= self._at_once - room
        if not self._count:  # the next steps take the handles that are left
            self._next_ns = now + _PERIOD_NS
        blocks = np.unique(np.concatenate(taken))
        return self._manager.index(self._tier, now=now, blocks=blocks)
