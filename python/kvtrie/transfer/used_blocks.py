"""UsedBlocks: the blocks whose last use the disk's files do not record yet.

A process that is killed finds its blocks again with the ages that were written down last, and gives
up those of the oldest age first. So what requests took and gave back is written down now and then.
Invariant: no more handles wait than `most`; beyond that the oldest uses go, whose blocks are the
next to leave. Cost: one array per use; a row per block on disk, so many at once at most.
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
    """Blocks that were used since they were last reported.

    Args:
        manager: whose blocks they are.
        tier: the tier whose files are updated; None updates none.
        most: handles that may wait.
        at_once: how many of them are looked at in one step.
    """

    def __init__(
        self, manager: BlockManager, tier: int | None, *, most: int = 1 << 16, at_once: int = 256
    ) -> None:
        self._manager, self._tier = manager, tier
        self._most, self._at_once = most, at_once
        self._waiting: deque[NDArray[np.uint64]] = deque()
        self._count = 0
        self._due = 0

    def __len__(self) -> int:
        """How many handles wait; one of a block that was used twice counts twice."""
        return self._count

    def use(self, handles: NDArray[np.uint64]) -> None:
        """Note that blocks were used just now."""
        if self._tier is None or not len(handles):
            return
        self._waiting.append(handles)
        self._count += len(handles)
        while self._count > self._most:
            self._count -= len(self._waiting.popleft())

    def take(self, now: int, *, idle: bool) -> Index:
        """Their index, with ages as of now; an empty one if that was done a moment ago.

        Args:
            now: the time.
            idle: nothing else is going on: it may be long until the next call.
        """
        if not self._count or self._tier is None or (now < self._due and not idle):
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
        if not self._count:  # the rest is reported in the next steps
            self._due = now + _PERIOD_NS
        blocks = np.unique(np.concatenate(taken))
        return self._manager.index(self._tier, now=now, blocks=blocks)
