"""What may leave a tier, what it is worth and who goes first: retention, written a second time.

Pure Python and exact: values are fractions, sets are searched from end to end, and nothing is
imported from kvtrie. A block is named by all tokens up to its end. The oracle is told what stands
where and who holds it (`World`); it says what may leave and judges what left (`Trial`).
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from fractions import Fraction

ALPHA, BETA, CONSTANT = Fraction(1, 16), Fraction(1), Fraction(1, 2)
"""A token behind l others costs l / 16 + 1, and under `retention` 1 / 2 more. They are binary
fractions, so that the manager's arithmetic is exact as well."""


@dataclass(slots=True)
class World:
    """What stands where, between two operations.

    Attributes:
        block_tokens: tokens of a block.
        policy: "lru", "flat" or "retention" without reuse.
        holes: whether blocks inside a sequence may go.
        layers: per tier, the layers of each block that stand or will stand there and are of use.
        present: per tier, all blocks that take room there, of use or not.
        settled: per tier, those of them that no move reads or writes.
        bad: per tier, those whose bytes could not be delivered.
        pinned: blocks that a lease holds.
        access: when each block was last used.
        spare: per tier, slots that are free or come free without an eviction.
        unwritable: blocks of which a store has failed; they are dropped instead.
    """

    block_tokens: int
    policy: str
    holes: bool
    layers: list[dict[tuple, frozenset]] = field(default_factory=list)
    present: list[set[tuple]] = field(default_factory=list)
    settled: list[set[tuple]] = field(default_factory=list)
    bad: list[set[tuple]] = field(default_factory=list)
    pinned: set[tuple] = field(default_factory=set)
    access: dict[tuple, int] = field(default_factory=dict)
    spare: list[int] = field(default_factory=list)
    unwritable: set[tuple] = field(default_factory=set)

    def depth(self, block):
        """How many blocks stand before this one."""
        return len(block) // self.block_tokens - 1

    def children(self, block, among):
        """The blocks of a set that stand directly behind this one."""
        length = len(block) + self.block_tokens
        return [other for other in among if len(other) == length and other[: len(block)] == block]

    def cost(self, block):
        """What it costs to compute a token of the block again."""
        if self.policy == "lru":
            return Fraction(1)
        context = self.depth(block) * self.block_tokens
        return ALPHA * context + BETA + (CONSTANT if self.policy == "retention" else 0)

    def order(self, block, now):
        """Blocks leave in ascending order of this; equal ones may leave either way.

        Cost over idle time, infinite at zero; then the cheaper, the older, the deeper one (with
        holes the shallower one).
        """
        idle, cost = now - self.access[block], self.cost(block)
        value = (0, cost / idle) if idle else (1, Fraction(0))
        tie = self.depth(block) if self.holes else -self.depth(block)
        return (*value, cost, self.access[block], tie)

    def may_leave(self, tier):
        """The blocks that may be victims: settled, on the first tier unpinned, and leaves."""
        return {
            block
            for block in self.settled[tier]
            if (tier > 0 or block not in self.pinned)
            and (self.holes or not self.children(block, self.present[tier]))
        }

    def dirty(self, tier, block):
        """The layers that would be lost if this copy went; none of a bad copy."""
        last = len(self.present) - 1
        others = range(last) if tier == last else range(tier + 1, last + 1)
        mine = self.layers[tier].get(block, frozenset())
        return mine.difference(*(self.layers[other].get(block, ()) for other in others))

    def can_go(self, tier, block, spared):
        """Whether there is a way to give up this copy while `spared` (per tier) must stay."""
        if not self.dirty(tier, block):
            return True
        below = tier + 1
        written = below < len(self.present) and block not in self.unwritable
        if written and block not in self.present[below]:
            others = self.may_leave(below) - spared[below] - {block}
            if self.spare[below] or any(self.can_go(below, other, spared) for other in others):
                return True
        if self.holes:
            return True
        tiers = range(len(self.present))
        quiet = all(block in self.settled[t] for t in tiers if block in self.present[t])
        behind = any(self.children(block, self.present[t]) for t in tiers)
        return quiet and block not in self.pinned and not behind


@dataclass(slots=True)
class Trial:
    """Judges the evictions of one operation, one after the other, as they were logged.

    Attributes:
        world: as it stood before, with what the operation pinned first; changed on the way.
        now: the time of the operation.
        spared: per tier, blocks that must stay; those that once could not go are added.
        chosen: blocks of the first tier that the operation named itself, whatever their value.
    """

    world: World
    now: int
    spared: list[set[tuple]]
    chosen: set[tuple] = field(default_factory=set)
    _dropped: tuple = ()

    def __post_init__(self):
        self.world, self.spared = deepcopy(self.world), deepcopy(self.spared)

    def judge(self, tier, block, reason):
        """Accept the eviction of a block from a tier, or say why it is wrong."""
        world = self.world
        again = reason == "dropped" and block == self._dropped and not world.holes
        if not again:  # a last copy of a leaf goes from all its tiers by one decision
            allowed = world.may_leave(tier) - self.spared[tier]
            assert block in allowed, f"{block} may not leave tier {tier} ({reason})"
            if tier > 0 or block not in self.chosen:
                self._first(tier, block, allowed - {block})
            dirty = world.dirty(tier, block)
            assert (reason == "clean") == (not dirty), f"{block} left tier {tier}: {reason}"
            if reason == "demoted":
                self._demote(tier + 1, block, dirty)
        self._dropped = block if reason == "dropped" else ()
        world.layers[tier].pop(block, None)
        for each in (world.present, world.settled, world.bad):
            each[tier].discard(block)
        world.spare[tier] += 1

    def _first(self, tier, block, others):
        mine = self.world.order(block, self.now)
        for other in others:
            if self.world.order(other, self.now) < mine:
                stays = not self.world.can_go(tier, other, self.spared)
                assert stays, f"{block} left tier {tier} before {other}, which is worth less"
                self.spared[tier].add(other)

    def _demote(self, below, block, dirty):
        world = self.world
        if block not in world.present[below]:
            assert world.spare[below] > 0, f"no room on tier {below} for {block}"
            world.spare[below] -= 1
            world.present[below].add(block)
        world.settled[below].discard(block)
        world.layers[below][block] = world.layers[below].get(block, frozenset()) | dirty
