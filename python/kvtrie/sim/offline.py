"""Offline caches with knowledge of the future: a bound on hits, and a reference for costs.

`most_hits` is Belady's rule on single blocks: no cache of the same room finds more blocks, as long
as it holds the blocks of each running request. `leaves_first` is the same rule on a cache of whole
prefixes with only last blocks evictable: a good plan, but not proven optimal.
Cost: O(blocks · log blocks).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from kvtrie.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["OfflineHits", "leaves_first", "most_hits"]

_NEVER = 2**62


class _HasBlocks(Protocol):
    """A request, reduced to the ids of its blocks."""

    @property
    def blocks(self) -> NDArray[Any]: ...


@dataclass(frozen=True, slots=True)
class OfflineHits:
    """Result of an offline cache.

    Attributes:
        blocks: found blocks of each request, as indices into its path.
    """

    blocks: tuple[tuple[int, ...], ...]

    @property
    def hits(self) -> int:
        """Total number of found blocks."""
        return sum(map(len, self.blocks))


def most_hits(requests: Sequence[_HasBlocks], capacity: int) -> OfflineHits:
    """Return the maximum hits of any cache with a capacity.

    Belady's rule (MIN, 1966): evict the block with the farthest next use.

    Args:
        requests: requests in order. Only the ids of their blocks count.
        capacity: number of blocks.

    Raises:
        ConfigError: a request longer than `capacity`.
    """
    _check(requests, capacity)
    paths = [request.blocks.tolist() for request in requests]
    following = _following(paths)
    cached: dict[int, int] = {}  # by block: the next request for it
    farthest: list[tuple[int, int]] = []
    found: list[tuple[int, ...]] = []
    for path, uses in zip(paths, following, strict=True):
        hits: list[int] = []
        for at, (block, use) in enumerate(zip(path, uses, strict=True)):
            if block in cached:
                hits.append(at)
            elif len(cached) == capacity:
                _evict(cached, farthest)
            cached[block] = use
            heapq.heappush(farthest, (-use, block))
        found.append(tuple(hits))
    return OfflineHits(tuple(found))


def _evict(cached: dict[int, int], farthest: list[tuple[int, int]]) -> None:
    while True:
        use, victim = heapq.heappop(farthest)
        if cached.get(victim) == -use:
            del cached[victim]
            return


def leaves_first(requests: Sequence[_HasBlocks], capacity: int) -> OfflineHits:
    """Return the hits of a cache of whole prefixes with only last blocks evictable.

    The last block with the farthest next use is evicted first.

    Args:
        requests: requests in order. Only the ids of their blocks count.
        capacity: number of blocks.

    Raises:
        ConfigError: a request longer than `capacity`.
    """
    _check(requests, capacity)
    paths = [request.blocks.tolist() for request in requests]
    cached: dict[int, int] = {}
    parent: dict[int, int] = {}
    children: dict[int, int] = {}  # number of resident children
    farthest: list[tuple[int, int]] = []
    found: list[tuple[int, ...]] = []
    for path, uses in zip(paths, _following(paths), strict=True):
        hits = next((n for n, block in enumerate(path) if block not in cached), len(path))
        found.append(tuple(range(hits)))
        # The running path is not in the heap. It is added below, when its next uses are known.
        for block in path[:hits]:
            cached[block] = -1
        while len(cached) + len(path) - hits > capacity:
            use, victim = heapq.heappop(farthest)
            if cached.get(victim) != -use or children.get(victim):
                continue
            del cached[victim]
            above = parent[victim]
            children[above] -= 1
            if not children[above] and cached.get(above, -1) >= 0:
                heapq.heappush(farthest, (-cached[above], above))
        for at, (block, use) in enumerate(zip(path, uses, strict=True)):
            cached[block] = use
            if at >= hits:
                parent[block] = above = path[at - 1] if at else -1
                children[above] = children.get(above, 0) + 1
        for block in path:
            if not children.get(block):
                heapq.heappush(farthest, (-cached[block], block))
    return OfflineHits(tuple(found))


def _check(requests: Sequence[_HasBlocks], capacity: int) -> None:
    longest = max((len(request.blocks) for request in requests), default=0)
    if longest > capacity:
        raise ConfigError(f"a request has {longest} blocks, the cache only {capacity}")


def _following(paths: list[list[int]]) -> list[list[int]]:
    """Return the number of the next path with each block of each path."""
    later: dict[int, int] = {}
    following: list[list[int]] = [[]] * len(paths)
    for at in range(len(paths) - 1, -1, -1):
        path = paths[at]
        following[at] = [later.get(block, _NEVER) for block in path]
        later.update(dict.fromkeys(path, at))
    return following
