"""PageOwners: the group that has each page of a tier, where files have a part per group.

Invariant: a group that takes a page over frees first what other groups have there. Cost: one call
per other group when a page goes from group to group.
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
            free: frees what it has in some slots: the first one, and the last plus 1.

        Returns:
            Takes the pages of some slots of the group, before it writes there.
        """
        self._free[group] = free
        return partial(self._take, group)

    def _take(self, group: int, slots: Iterable[int]) -> None:
        with self._lock:
            self._before()
            for page in {slot // self._per_page[group] for slot in slots}:
                # A slot beyond the pages is refused by the file.
                if page >= len(self._owner) or self._owner[page] == group:
                    continue
                for other, each in enumerate(self._per_page):
                    if other != group:
                        self._free[other](page * each, (page + 1) * each)
                self._owner[page] = group
