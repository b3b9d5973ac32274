"""PageOwners: the owning group of each page of a tier with separate files per group.

Invariant: a group taking over a page first frees the blocks of other groups in it.
Cost: a call per group when a page changes its owner.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvtrie.tiers.group_slots import GroupSlots

__all__ = ["PageOwners"]

_NO_GROUP = -1


class PageOwners:
    """The owners of the pages of a tier.

    Args:
        groups: the slots of each group.
        before: called before pages are taken.
    """

    def __init__(
        self, groups: Sequence[GroupSlots], before: Callable[[], object] = lambda: None
    ) -> None:
        self._per_page = [one.per_page for one in groups]
        self._owner = np.full(groups[0].blocks // groups[0].per_page, _NO_GROUP, dtype=np.int16)
        self._before, self._lock = before, threading.Lock()
        self._free: dict[int, Callable[[int, int], object]] = {}

    def join(
        self, group: int, free: Callable[[int, int], object]
    ) -> Callable[[Iterable[int]], None]:
        """Add the part of a group.

        Args:
            group: the group's number.
            free: frees a group's blocks in a range of slots: the first slot, and the end.

        Returns:
            A function to take over the pages of some slots before the group writes to them.
        """
        self._free[group] = free
        return partial(self._take, group)

    def _take(self, group: int, slots: Iterable[int]) -> None:
        with self._lock:
            self._before()
            for page in {slot // self._per_page[group] for slot in slots}:
                # The file refuses a slot beyond the pages.
                if page >= len(self._owner) or self._owner[page] == group:
                    continue
                for other, each in enumerate(self._per_page):
                    if other != group:
                        self._free[other](page * each, (page + 1) * each)
                self._owner[page] = group
