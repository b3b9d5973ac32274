"""Versions: retention of KV of a server's older weights.

A trainer updates weights repeatedly, and may return to older weights. KV of the last few older
weights is kept, but evicted before KV of the current weights. KV of still older weights is dropped.
Blocks of an earlier server have versions in unknown order, so they are evicted first, and dropped
at a change.
Invariant: KV of the current weights is never dropped. Cost: a comparison per step. After a change
of weights, each step visits some blocks until all were visited, at any number of requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from kvtrie import BlockManager

__all__ = ["Versions"]

_PER_STEP = 512  # blocks, about 3 microseconds each if they are dropped


class Versions:
    """The weights of a server, the current weights first.

    Args:
        manager: the manager of their KV, with weights in its scopes' names.
        keep: the number of older versions with KV to keep.
    """

    def __init__(self, manager: BlockManager, keep: int) -> None:
        self._manager, self._keep = manager, keep
        self._names = [""]
        self._others: Literal["retire", "drop"] = "retire"
        self._passing, self._start = manager.stats().blocks > 0, None
        self._left = 0  # blocks not dropped in this pass

    def step(self, weights: str, now: int) -> None:
        """Record the current weights, and continue the pass over all blocks.

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
