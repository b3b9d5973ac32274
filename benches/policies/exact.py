"""`retention` written a second time, with ghosts that forget and mistake nothing.

A cache of whole prefixes that scans all its last blocks for each victim and remembers the uses of
the last four blocks per block of room that left. The hits that the manager loses to its short
fingerprints are the difference between the two. Cost: O(last blocks) per victim, in numpy.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvtrie.sim.offline import OfflineHits

if TYPE_CHECKING:
    from kvtrie.sim.trace import TraceRequest

BLOCK = 512
MOST_USES = 32
GHOSTS = 4


class Leaves:
    """The last blocks that may leave, as columns."""

    def __init__(self, room: int) -> None:
        self.ids = np.zeros(room + 1, dtype=np.int64)
        self.cost = np.zeros(room + 1)
        self.access = np.zeros(room + 1)
        self.at: dict[int, int] = {}

    def add(self, block: int, cost: float, access: int) -> int:
        """Returns the row."""
        row = self.at[block] = len(self.at)
        self.ids[row], self.cost[row], self.access[row] = block, cost, access
        return row

    def remove(self, block: int) -> tuple[int, int]:
        """Returns the row that became free and the one that moved there."""
        row, last = self.at.pop(block), len(self.at)
        if row != last:
            moved = int(self.ids[last])
            self.at[moved] = row
            for column in (self.ids, self.cost, self.access):
                column[row] = column[last]
        return row, last


@dataclass(slots=True)
class Block:
    """A block that is kept."""

    depth: int
    parent: int
    uses: int
    access: int
    children: int = 0

    @property
    def cost(self) -> float:
        """Cost of losing the block."""
        return min(self.uses, MOST_USES) * (1 + BLOCK * self.depth / 10_700)


class Cache:
    """Whole prefixes in a room of blocks."""

    def __init__(self, room: int, ghosts: int) -> None:
        self.room = room
        self.ghosts = ghosts * room
        self.blocks: dict[int, Block] = {}
        self.gone: OrderedDict[int, int] = OrderedDict()
        self.leaves = Leaves(room)

    def find(self, path: list[int]) -> int:
        """The number of leading blocks that are kept."""
        return next((n for n, block in enumerate(path) if block not in self.blocks), len(path))

    def evict(self, blocks: int, pinned: set[int], now: int) -> None:
        """Evict this number of blocks."""
        leaves = self.leaves
        value = np.empty(self.room + 1)
        count = len(leaves.at)
        value[:count] = leaves.cost[:count] / (now - leaves.access[:count])
        for _ in range(blocks):
            block = int(leaves.ids[value[: len(leaves.at)].argmin()])
            victim = self.blocks.pop(block)
            if self.ghosts:
                self.gone[block] = victim.uses
                if len(self.gone) > self.ghosts:
                    self.gone.popitem(last=False)
            row, last = leaves.remove(block)
            value[row] = value[last]
            parent = self.blocks.get(victim.parent)
            if parent is None:
                continue
            parent.children -= 1
            if not parent.children and victim.parent not in pinned:
                row = leaves.add(victim.parent, parent.cost, parent.access)
                value[row] = parent.cost / (now - parent.access)

    def serve(self, path: list[int], now: int) -> int:
        """A request; returns how many blocks were found."""
        hits = self.find(path)
        if hits and path[hits - 1] in self.leaves.at:
            self.leaves.remove(path[hits - 1])
        missing = len(self.blocks) + len(path) - hits - self.room
        if missing > 0:
            self.evict(missing, set(path[:hits]), now)
        for depth, block in enumerate(path):
            parent = path[depth - 1] if depth else -1
            if depth < hits:
                self.blocks[block].uses += 1
                self.blocks[block].access = now
                continue
            self.blocks[block] = Block(depth, parent, 1 + self.gone.pop(block, 0), now)
            if depth:
                self.blocks[parent].children += 1
        last = self.blocks[path[-1]]
        if not last.children:
            self.leaves.add(path[-1], last.cost, now)
        return hits


def exact_retention(requests: list[TraceRequest], room: int, ghosts: int = GHOSTS) -> OfflineHits:
    """Hits with `uses * cost / idle`; `ghosts` per block of room, 0 for none."""
    cache = Cache(room, ghosts)
    found: list[tuple[int, ...]] = []
    now = 0
    for request in requests:
        now = max(now + 1, request.at)
        found.append(tuple(range(cache.serve(request.blocks.tolist(), now))))
    return OfflineHits(tuple(found))
