"""LastUses: LRU positions of the blocks last used by each request.

A segment tree over requests, with the current and the largest base of each (`capacities`). Inner
nodes have additions still to be applied to their leaves, each as a sum and its largest prefix sum.
Invariant: a base never falls while its request has blocks. Cost: O(log requests) per call and entry
of `moved`, and two numbers per request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["LastUses"]


class LastUses:
    """Bases of all requests so far."""

    def __init__(self) -> None:
        self._requests = 0
        self._leaves = 1
        self._sum, self._most = [0, 0], [0, 0]  # root: 1, children of n: 2n, 2n + 1

    def most(self, request: int) -> int:
        """Return the largest base of a request so far. The first base is 1."""
        return self._most[self._reach(request)]

    def use(self, moved: Iterable[tuple[int, int, int]], size: int, room: int) -> None:
        """Move blocks to the front as the blocks of the next request.

        Args:
            moved: earlier requests, with the numbers of their blocks reused and recomputed by this
                request. While it runs, recomputed blocks are present twice.
            size: number of blocks of the request.
            room: further blocks taken while it runs.
        """
        for request, count, again in moved:
            self._add(request, again - count)
        if self._requests:
            self._apply(1, size, size + room)
        for request, _, again in moved:
            if again:
                self._add(request, -again)
        if self._requests == self._leaves:
            self._grow()
        leaf = self._reach(self._requests)
        self._sum[leaf] = self._most[leaf] = 1
        self._requests += 1

    def _apply(self, node: int, amount: int, most: int) -> None:
        before = self._sum[node]
        self._most[node] = max(self._most[node], before + most)
        self._sum[node] = before + amount

    def _reach(self, request: int) -> int:
        """Apply all additions to the leaf of a request, and return it."""
        sums, mosts, leaf = self._sum, self._most, self._leaves + request
        for shift in range(leaf.bit_length() - 1, 0, -1):
            node = leaf >> shift
            amount, most = sums[node], mosts[node]
            if amount or most:
                sums[node] = mosts[node] = 0
                for child in (2 * node, 2 * node + 1):
                    before = sums[child]
                    mosts[child] = max(mosts[child], before + most)
                    sums[child] = before + amount
        return leaf

    def _add(self, request: int, amount: int) -> None:
        """Add an amount of at most 0 to the bases of a request and all earlier requests."""
        sums, node = self._sum, self._reach(request)
        sums[node] += amount
        while node > 1:
            if node & 1:
                sums[node - 1] += amount
            node >>= 1

    def _grow(self) -> None:
        """Double the leaves."""
        leaves = self._leaves
        for request in range(leaves):
            self._reach(request)
        for name in ("_sum", "_most"):
            values = getattr(self, name)[leaves:]
            setattr(self, name, [0] * (2 * leaves) + values + [0] * leaves)
        self._leaves = 2 * leaves
