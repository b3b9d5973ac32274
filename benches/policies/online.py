"""Online policies that kvtrie does not have: how many leading blocks of each prompt they find.

`RandomCompute` and `LRU, demotion` are rules for a cache of whole prefixes, in which only last
blocks may leave. ARC and S3-FIFO are libcachesim's and know no prefixes: a request asks for its
blocks last to first, and those found are the leading ones. A constant is a part of a name.
Invariant: a request longer than the room finds nothing and stores nothing. Cost: about a
microsecond per block that comes or goes.
"""

from __future__ import annotations

import heapq
import random
from typing import TYPE_CHECKING, Protocol

from kvtrie.model.cost import Cost

if TYPE_CHECKING:
    from collections.abc import Sequence

RANDOM = "RandomCompute"
DEMOTION = "LRU, demotion"
THEIRS = ("S3FIFO", "ARC")
CONSTANTS: dict[str, tuple[float, ...]] = {
    RANDOM: (0.5, 1.0),
    DEMOTION: (0.3, 0.6),
    "S3FIFO": (0.1, 0.3),
    "ARC": (0.0,),
}
"""The exponent of the cost; the share of room for blocks used once; that of the small queue."""


def named(policy: str, constant: float) -> str:
    """The name of a policy with a constant."""
    return f"{policy} {constant:g}" if len(CONSTANTS[policy]) > 1 else policy


NAMES = {named(policy, each): (policy, each) for policy in CONSTANTS for each in CONSTANTS[policy]}


NEEDS = {name for name, (policy, _) in NAMES.items() if policy in THEIRS}
"""Those that need libcachesim."""


class Rule(Protocol):
    """Eviction order of a cache of prefixes."""

    def put(self, block: int, at: int) -> None:
        """Add a leaf without users, at its place in the path."""

    def use(self, path: Sequence[int], found: int) -> None:
        """Note a request's path and the number of its cached blocks."""

    def victim(self, is_last: dict[int, int]) -> int:
        """Return the leaf to evict; skip blocks that have children now."""

    def gone(self, block: int) -> None:
        """Forget an evicted block."""


class RandomCompute:
    """A random last block leaves, with a chance of 1 / its cost to a power.

    Each last block has an exponential clock whose mean is the power of its cost; the first to ring
    leaves. Exponential clocks have no memory, so those of new blocks begin at the last ring.
    """

    def __init__(self, exponent: float, block_tokens: int, seed: int) -> None:
        self._exponent, self._context = exponent, Cost().alpha * block_tokens
        self._rng = random.Random(seed)
        self._rings: list[tuple[float, int]] = []
        self._due: dict[int, float] = {}
        self._now = 0.0

    def put(self, block: int, at: int) -> None:
        """Add a last block."""
        mean = (1 + self._context * at) ** self._exponent
        due = self._now + self._rng.expovariate(1.0) * mean
        self._due[block] = due
        heapq.heappush(self._rings, (due, block))

    def use(self, path: Sequence[int], found: int) -> None:
        """Do nothing: chance knows no uses."""

    def victim(self, is_last: dict[int, int]) -> int:
        """Choose the block that leaves."""
        while True:
            due, block = heapq.heappop(self._rings)
            if block in is_last and self._due[block] == due:
                self._now = due
                return block

    def gone(self, block: int) -> None:
        """Forget a block."""
        del self._due[block]


class Demotion:
    """LRU, in which blocks used once leave first while they take more than a share of the room."""

    def __init__(self, share: float, room: int) -> None:
        self._most = share * room
        self._request = 0
        self._used: dict[int, int] = {}
        self._once: set[int] = set()
        self._oldest: list[tuple[int, int]] = []
        self._oldest_once: list[tuple[int, int]] = []

    def put(self, block: int, at: int) -> None:
        """Add a last block."""
        del at
        heap = self._oldest_once if block in self._once else self._oldest
        heapq.heappush(heap, (self._used[block], block))

    def use(self, path: Sequence[int], found: int) -> None:
        """Count a request."""
        self._request += 1
        self._used.update(dict.fromkeys(path, self._request))
        self._once.difference_update(path[:found])
        self._once.update(path[found:])

    def victim(self, is_last: dict[int, int]) -> int:
        """Choose the block that leaves."""
        once, often = self._head(self._oldest_once, is_last), self._head(self._oldest, is_last)
        demoted = len(self._once) > self._most or not often
        heap = self._oldest_once if once and (demoted or once < often) else self._oldest
        return heapq.heappop(heap)[1]

    def _head(self, heap: list[tuple[int, int]], is_last: dict[int, int]) -> list[tuple[int, int]]:
        def stale(used: int, block: int) -> bool:
            right = self._oldest_once if block in self._once else self._oldest
            return block not in is_last or self._used.get(block) != used or heap is not right

        while heap and stale(*heap[0]):
            heapq.heappop(heap)
        return heap[:1]

    def gone(self, block: int) -> None:
        """Forget a block."""
        del self._used[block]
        self._once.discard(block)


def prefixes(
    paths: Sequence[list[int]], prompts: Sequence[int], room: int, rule: Rule
) -> list[int]:
    """Leading blocks that a cache of whole prefixes finds of each prompt.

    Args:
        paths: blocks that each request stores, those of its prompt first.
        prompts: number of blocks of each prompt.
        room: blocks.
        rule: which last block leaves.
    """
    cached: dict[int, int] = {}  # place in the path
    parent: dict[int, int] = {}
    children: dict[int, int] = {}
    last: dict[int, int] = {}
    matched: list[int] = []
    for path, prompt in zip(paths, prompts, strict=True):
        if len(path) > room:
            matched.append(0)
            continue
        found = next((at for at, block in enumerate(path) if block not in cached), len(path))
        matched.append(min(found, prompt))
        held = path[found - 1] if found else -1
        last.pop(held, None)  # the path of the request that runs stays
        while len(cached) + len(path) - found > room:
            victim = rule.victim(last)
            del cached[victim], last[victim]
            rule.gone(victim)
            above = parent.pop(victim)
            children[above] -= 1
            if not children[above]:
                del children[above]
                if above != held and above in cached:
                    last[above] = cached[above]
                    rule.put(above, cached[above])
        rule.use(path, found)
        for at in range(found, len(path)):
            above = path[at - 1] if at else -1
            cached[path[at]], parent[path[at]] = at, above
            children[above] = children.get(above, 0) + 1
        if path[-1] not in children:
            last[path[-1]] = len(path) - 1
            rule.put(path[-1], len(path) - 1)
    return matched


def singly(paths: Sequence[list[int]], prompts: Sequence[int], room: int, name: str) -> list[int]:
    """Leading blocks that a policy of libcachesim finds, to which each block is an object."""
    import libcachesim

    policy, constant = NAMES[name]
    more = {"small_size_ratio": constant} if policy == "S3FIFO" else {}
    cache = getattr(libcachesim, policy)(cache_size=room, **more)
    wanted = libcachesim.Request()
    wanted.obj_size = 1
    matched: list[int] = []
    for path, prompt in zip(paths, prompts, strict=True):
        found = 0
        if len(path) <= room:
            for block in path[:prompt]:
                wanted.obj_id = block
                if cache.find(wanted, update_cache=False) is None:
                    break
                found += 1
            for block in reversed(path):
                wanted.obj_id = block
                cache.get(wanted)
        matched.append(found)
    return matched


def baseline(
    name: str, paths: Sequence[list[int]], prompts: Sequence[int], room: int, block_tokens: int
) -> list[int]:
    """Leading blocks that the policy of a name finds of each prompt."""
    policy, constant = NAMES[name]
    if policy in THEIRS:
        return singly(paths, prompts, room, name)
    if policy == RANDOM:
        return prefixes(paths, prompts, room, RandomCompute(constant, block_tokens, 0))
    return prefixes(paths, prompts, room, Demotion(constant, room))
