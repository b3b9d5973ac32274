"""Versions: KV of the weights that a server computed with before the current ones.

A trainer updates weights again and again, and may go back. KV of the last few older weights stays
and leaves before all other KV; that of weights before those is dropped. The versions of blocks that
an earlier server left are in no known order, so they leave first, and are dropped at a change.
Invariant: KV of the current weights is never dropped. Cost: a comparison per step; after a change
of weights a visit to some blocks per step, until all were visited, whatever the number of requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from kvtrie import BlockManager

__all__ = ["Versions"]

_PER_STEP = 512  # blocks; about 3 microseconds each if they are dropped


class Versions:
    """The weights of a server, the current ones first.

    Args:
        manager: the manager of their KV, whose scopes are named by weights.
        keep: older versions whose KV is kept.
    """

    def __init__(self, manager: BlockManager, keep: int) -> None:
        self._manager, self._keep = manager, keep
        self._names = [""]
        self._others: Literal["retire", "drop"] = "retire"
        self._passing, self._start = manager.stats().blocks > 0, None
        self._left = 0  # blocks that this pass could not drop

    def step(self, weights: str, now: int) -> None:
        """Take note of the current weights, and go on with the pass over all blocks.

        Args:
            weights: their name.
            now: the time.
        """
        if weights != self._names[0]:
            older = [name for name in self._names if name != weights]
            self._names = [weights, *older][: self._keep + 1]
            self._others, self._passing, self._start, self._left = "drop", True, None, 0
        if not self._passing:
            return
        self._start, _, left = self._manager.sort_versions(
            self._names[:1],
            self._names[1:],
            self._others,
            blocks=_PER_STEP,
            now=now,
            start=self._start,
        )
        self._left += left
        if self._start is None:
            self._passing, self._left = self._left > 0, 0
