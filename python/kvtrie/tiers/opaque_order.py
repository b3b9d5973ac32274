"""OpaqueOrder: which of many blocks leaves first, where only an engine knows what keys mean.

A block is worth its cost times its uses by the time since the last use; cost grows with its place
in the sequence. Lower priorities leave before higher ones, whatever they are worth, and a block
leaves before the one that it stands behind, unless only that one may leave.
Invariant: victims are taken all or none; among leaves of one priority none is worth more than a
quarter above the least. Cost: logarithmic per use; per victim a look at each class of costs, of
which there are a few dozen.
"""

from __future__ import annotations

import heapq
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtrie.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable

__all__ = ["OpaqueOrder"]

_USUAL = 35  # the priority of a block that no hint names, as in `Retain`
_MOST_USES = 64
_SLOPE = (
    1 / 24_576
)  # of a model of width 4096: attention costs as much as the rest behind 24k tokens
_STEP = math.log(1.25)


@dataclass(slots=True, eq=False)
class _Entry:
    key: Hashable
    cost: float
    used: int
    above: _Entry | None = None
    uses: int = 1
    children: int = 0
    priority: int = _USUAL
    until: int | None = None
    free: bool = True  # whether it may leave
    alive: bool = True
    stamp: int = 0  # of its row in a heap that counts

    @property
    def kind(self) -> tuple[int, int]:
        """Priority, and class of what it is worth at equal age."""
        return self.priority, round(math.log(self.cost * min(self.uses, _MOST_USES)) / _STEP)


class OpaqueOrder:
    """Keys in the order in which they should leave.

    Args:
        clock: nanoseconds, monotone.
    """

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock = clock
        self._entries: dict[Hashable, _Entry] = {}
        self._heaps: dict[tuple[int, int], list[tuple[int, int, Hashable]]] = {}
        self._ends: list[tuple[int, int, Hashable]] = []
        self._stamp = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._entries

    def add(
        self,
        key: Hashable,
        *,
        position: int = 0,
        behind: Hashable | None = None,
        free: bool = True,
        used: int | None = None,
        uses: int = 1,
    ) -> None:
        """Add a key that is not there.

        Args:
            key: the key.
            position: tokens before it.
            behind: the key of the block before it; one that is not there says nothing.
            free: whether it may leave.
            used: when it was used last; None is now.
            uses: how often it was used.

        Raises:
            ConfigError: the key is there, or the position is below 0.
        """
        if key in self._entries or position < 0:
            raise ConfigError(f"a key that is there already, or position {position} below 0")
        above = self._entries.get(behind) if behind is not None else None
        now = self._clock() if used is None else used
        entry = _Entry(key, 1 + _SLOPE * position, now, uses=uses, free=free)
        self._entries[key] = entry
        self._hang(entry, above)
        self._enter(entry)

    def use(self, key: Hashable, *, count: bool = True) -> None:
        """Note that a key is used now; one that is not there says nothing."""
        entry = self._entries.get(key)
        if entry is not None:
            entry.used = self._clock()
            entry.uses += count
            self._enter(entry)

    def last_use(self, key: Hashable) -> tuple[int, int]:
        """When a key that is there was used last, and how often in all."""
        entry = self._entries[key]
        return entry.used, entry.uses

    def place(self, key: Hashable, position: int, behind: Hashable | None) -> None:
        """Say where a key stands in its sequence, once that is known."""
        entry = self._entries.get(key)
        if entry is None:
            return
        entry.cost = 1 + _SLOPE * max(position, 0)
        above = self._entries.get(behind) if behind is not None and behind != key else None
        if entry.above is None and not entry.children:  # so that no ring can come to be
            self._hang(entry, above)
        self._enter(entry)

    def keep(self, key: Hashable, priority: int, ttl_ns: int | None = None) -> None:
        """Give a key a priority, 0 to 100, for some time or for good; 35 is that of the others."""
        entry = self._entries.get(key)
        if entry is not None:
            entry.priority = priority
            entry.until = None if ttl_ns is None else self._clock() + ttl_ns
            self._enter(entry)
            if entry.until is not None:
                heapq.heappush(self._ends, (entry.until, self._stamp, key))

    def hold(self, key: Hashable, *, free: bool) -> None:
        """Say whether a key may leave."""
        entry = self._entries[key]
        entry.free = free
        self._enter(entry)

    def remove(self, key: Hashable) -> None:
        """Forget a key."""
        entry = self._entries.pop(key)
        entry.alive = False
        self._unhang(entry)

    def clear(self) -> None:
        """Forget all."""
        self._entries, self._heaps, self._ends = {}, {}, []

    def victims(self, count: int, protected: Collection[Hashable] = ()) -> list[Hashable] | None:
        """Take `count` keys out, those that should leave first.

        Args:
            count: how many.
            protected: keys that stay.

        Returns:
            The keys, or None if fewer may leave; nothing has changed then.
        """
        now = self._clock()
        self._end_priorities(now)
        taken: list[_Entry] = []
        skipped: list[Hashable] = []
        while len(taken) < count:
            key = self._first(now, protected, skipped)
            key = self._above(protected) if key is None else key
            if key is None:
                break
            taken.append(self._entries.pop(key))
            self._unhang(taken[-1])
        if len(taken) < count:
            self._put_back(taken)
        for key in skipped:
            if key in self._entries:
                self._enter(self._entries[key])
        if len(taken) < count:
            return None
        for entry in taken:
            entry.alive = False
        return [entry.key for entry in taken]

    def _put_back(self, taken: list[_Entry]) -> None:
        for entry in reversed(taken):
            self._entries[entry.key] = entry
            if entry.above is not None and entry.above.alive:
                entry.above.children += 1
                self._enter(entry.above)
            self._enter(entry)

    def _first(
        self, now: int, protected: Collection[Hashable], skipped: list[Hashable]
    ) -> Hashable | None:
        """The leaf of the lowest priority that is worth least."""
        best: tuple[int, float, int] | None = None
        chosen: list[tuple[int, int, Hashable]] | None = None
        for kind, heap in list(self._heaps.items()):
            self._trim(heap, protected, skipped)
            if not heap:
                del self._heaps[kind]
                continue
            used, stamp, key = heap[0]
            entry = self._entries[key]
            worth = entry.cost * min(entry.uses, _MOST_USES) / max(now - used, 1)
            if best is None or (kind[0], worth, stamp) < best:
                best, chosen = (kind[0], worth, stamp), heap
        return None if chosen is None else heapq.heappop(chosen)[2]

    def _trim(
        self,
        heap: list[tuple[int, int, Hashable]],
        protected: Collection[Hashable],
        skipped: list[Hashable],
    ) -> None:
        """Take from the head of a heap what does not count any more, or may not leave now."""
        while heap:
            if self._counts(heap[0]):
                if heap[0][2] not in protected:
                    return
                skipped.append(heap[0][2])
            heapq.heappop(heap)

    def _above(self, protected: Collection[Hashable]) -> Hashable | None:
        """A key that others stand behind which may not leave: what is left to take."""
        able = (
            (entry.priority, -entry.cost, entry.used, at, key)
            for at, (key, entry) in enumerate(self._entries.items())
            if entry.free and entry.children and key not in protected
        )
        return min(able, default=(None,))[-1]

    def _end_priorities(self, now: int) -> None:
        while self._ends and self._ends[0][0] <= now:
            until, _, key = heapq.heappop(self._ends)
            entry = self._entries.get(key)
            if entry is not None and entry.until == until:
                entry.priority, entry.until = _USUAL, None
                self._enter(entry)

    def _enter(self, entry: _Entry) -> None:
        """Have a key in the heap of its kind if it may leave; other rows of it do not count."""
        self._stamp += 1
        entry.stamp = self._stamp
        if entry.free and not entry.children:
            heap = self._heaps.setdefault(entry.kind, [])
            heapq.heappush(heap, (entry.used, self._stamp, entry.key))
            if len(heap) > 64 + 4 * len(self._entries):  # rows that do not count any more
                heap[:] = [row for row in heap if self._counts(row)]
                heapq.heapify(heap)

    def _counts(self, row: tuple[int, int, Hashable]) -> bool:
        entry = self._entries.get(row[2])
        return entry is not None and entry.stamp == row[1]

    def _hang(self, entry: _Entry, above: _Entry | None) -> None:
        """Put an entry behind another one, which then leaves after it."""
        entry.above = above
        if above is not None:
            above.children += 1
            self._enter(above)

    def _unhang(self, entry: _Entry) -> None:
        """Take an entry that leaves off the one that it stands behind."""
        above = entry.above
        if above is not None and above.alive:
            above.children -= 1
            if not above.children and above.key in self._entries:
                self._enter(above)
