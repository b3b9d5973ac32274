"""Evictions per tier and their order, written a second time.

Pure Python and exact: values are fractions, sets are searched from end to end, and nothing is
imported from kvtrie. A block is named by all tokens up to its end. The oracle gets the
blocks of each tier and their leases (`World`) and predicts all evictions of an operation (`Room`).

It knows the order of every policy but `learned`, which depends on every use and eviction since the
beginning, in their order within each operation; of it only what holds under any policy is asked.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from fractions import Fraction

ALPHA, BETA, CONSTANT = Fraction(1, 16), Fraction(1), Fraction(1, 2)
"""A token after l others costs l / 16 + 1, and 1 / 2 more but under `flat`. They are binary
fractions, so that the manager's arithmetic is exact as well."""

UNKNOWN = frozenset({"learned"})
"""Policies whose order is not foretold."""

READ = frozenset({"weighted", "restore"})
"""Policies whose prices depend on sessions or plans: they are read from
explanations, and the order is foretold by them."""

HOST, DISK = 1, 2  # tiers, by their places


def classed(cost, epsilon):
    """A cost as it is compared: in units of 2^-40, rounded down to classes `1 + epsilon` apart."""
    number = int(Fraction(cost) * 2**40 + Fraction(1, 2))
    bits = next((bits for bits in range(63) if Fraction(1, 2**bits) <= epsilon), 63)
    low = max(0, number.bit_length() - 1 - bits)
    return number >> low << low


@dataclass(slots=True)
class World:
    """Residency of all blocks, between two operations.

    Attributes:
        block_tokens: tokens of a block.
        policy: any; `retention` without reuse.
        epsilon: how far costs are rounded, as a fraction.
        holes: whether blocks inside a sequence may go.
        whole: the layers of a block.
        rooms: the blocks of each tier: gpu, host, disk, remote.
        layers: per tier, the usable layers of each block, stored there or in flight to it.
        present: per tier, all blocks that take room there, of use or not.
        idle_blocks: per tier, those of them that no move reads or writes.
        bad: per tier, those whose bytes could not be delivered.
        pinned: blocks that a lease holds.
        access: when each block was last used; under `checkerboard` its session.
        uses: how often each block was used since it is known.
        brought: per (tier, block), how many requests there were when it came there.
        prices: per (tier, block), its price where that is read.
        number: what decides between blocks that are equal in everything else.
        spare: per tier, slots that are free or come free without an eviction.
        unwritable: (tier, block) of blocks that a tier refused; they are dropped instead.
        said: what hints say of a block: priorities, each with the time at which it ends or None.
    """

    block_tokens: int
    policy: str
    epsilon: Fraction
    holes: bool
    whole: frozenset = frozenset()
    rooms: tuple[int, ...] = ()
    layers: list[dict[tuple, frozenset]] = field(default_factory=list)
    present: list[set[tuple]] = field(default_factory=list)
    idle_blocks: list[set[tuple]] = field(default_factory=list)
    bad: list[set[tuple]] = field(default_factory=list)
    pinned: set[tuple] = field(default_factory=set)
    access: dict[tuple, int] = field(default_factory=dict)
    uses: dict[tuple, int] = field(default_factory=dict)
    brought: dict[tuple, int] = field(default_factory=dict)
    prices: dict[tuple, float] = field(default_factory=dict)
    number: dict[tuple, int] = field(default_factory=dict)
    spare: list[int] = field(default_factory=list)
    unwritable: set[tuple] = field(default_factory=set)
    said: dict[tuple, list[tuple]] = field(default_factory=dict)

    def depth(self, block):
        """Number of blocks before this one."""
        return len(block) // self.block_tokens - 1

    def children(self, block, among):
        """The blocks of a set that directly follow this one."""
        length = len(block) + self.block_tokens
        return [other for other in among if len(other) == length and other[: len(block)] == block]

    def reserve(self, tier):
        """Slots that only what passes from disk to remote may take."""
        passed = tier == HOST and len(self.rooms) > DISK + 1
        return max(1, self.rooms[tier] // 16) if passed else 0

    @property
    def foretold(self):
        """Whether the order of leaving is known."""
        return self.policy not in UNKNOWN

    def cost(self, tier, block):
        """The cost of losing the block from a tier."""
        if self.policy in READ:
            return self.prices[tier, block]
        if self.policy == "lfu":
            return Fraction(self.uses[block])
        if self.policy in UNKNOWN | {"lru", "fifo"}:
            return Fraction(1)
        context = self.depth(block) * self.block_tokens
        return ALPHA * context + BETA + (0 if self.policy == "flat" else CONSTANT)

    def priority(self, block, now):
        """The highest one that holds now; 35 if nothing is said."""
        said = self.said.get(block, ())
        return max((priority for priority, end in said if end is None or end > now), default=35)

    def order(self, tier, block, now):
        """Blocks leave in ascending order of this: the priority, then the policy's rule, then the
        deeper one (with holes the shallower one), and the one with the smaller number."""
        tie = self.depth(block) if self.holes else -self.depth(block)
        return (self.priority(block, now), *self.rule(tier, block, now), tie, self.number[block])

    def rule(self, tier, block, now):
        """By cost over idle time, infinite at zero; then the cheaper, the older one. Or by
        a rule that time does not change, or by the age of the session."""
        idle = now - self.access[block]
        if self.policy == "fifo":
            return (self.brought[tier, block],)
        if self.policy == "lfu":
            return (self.uses[block], self.access[block])
        if self.policy == "checkerboard":
            # The ages of a session double from class to class; whole blocks go front first, and
            # their numbers break ties.
            return (-idle.bit_length(), self.depth(block), self.number[block])
        cost = classed(self.cost(tier, block), self.epsilon)
        value = (0, Fraction(cost, idle)) if idle else (1, Fraction(0))
        return (*value, cost, self.access[block])

    def may_leave(self, tier):
        """The blocks that may be victims: idle, on the first tier unpinned, and leaves."""
        return {
            block
            for block in self.idle_blocks[tier]
            if (tier > 0 or block not in self.pinned)
            and (self.holes or not self.children(block, self.present[tier]))
        }

    def dirty(self, tier, block):
        """The layers that would be lost if this copy went; none of a bad copy."""
        last = len(self.present) - 1
        others = range(last) if tier == last else range(tier + 1, last + 1)
        mine = self.layers[tier].get(block, frozenset())
        return mine.difference(*(self.layers[other].get(block, ()) for other in others))


class Room:
    """Makes room in a copy of a world, one victim after the other.

    Attributes:
        log: what leaves, in order: (tier, block, reason).
    """

    def __init__(self, world, now, stay=(), *, dropping=False):
        self.world = deepcopy(world)
        self.now = now
        self.dropping = dropping  # only victims that cannot be dropped are written down
        self.moving = []  # blocks that room is being made for on a lower tier
        self.seen = set(stay)  # (tier, block) that were looked at, and stay or have left
        # A block that may leave now may do so later, even if moves bring blocks after it.
        self.free = [self.world.may_leave(tier) for tier in range(len(world.present))]
        self.log = []
        self.kept = [0 if dropping else world.reserve(t) for t in range(len(world.present))]

    def make(self, tier, units):
        """Take `units` slots of a tier; False if that many cannot be had."""
        world = self.world
        while units and world.spare[tier] < units + self.kept[tier]:
            allowed = [b for b in self.free[tier] if (tier, b) not in self.seen]
            if not allowed:
                return False
            self.decide(tier, min(allowed, key=lambda block: world.order(tier, block, self.now)))
        world.spare[tier] -= units
        return True

    def decide(self, tier, block):
        """Give one copy up, if there is a way."""
        self.seen.add((tier, block))
        dirty = self.world.dirty(tier, block)
        if not dirty:
            self._leave(tier, block, "clean")
        elif self.dropping and self._drop(tier, block):
            pass
        elif self._write(tier + 1, block, dirty):
            self._leave(tier, block, "demoted")
        else:
            self._drop(tier, block)

    def _write(self, below, block, dirty):
        world = self.world
        if below == len(world.present) or block in world.bad[below]:
            return False
        stored_below = block in world.present[below]
        # A copy that failed on its way there still takes its slot.
        stuck = stored_below and not world.layers[below].get(block)
        if stuck or (below, block) in world.unwritable:
            return False
        joined = world.layers[below].get(block, frozenset()) | dirty
        above = {layer for layer in world.whole if layer > max(joined)}
        if above.difference(*(layers.get(block, ()) for layers in world.layers)):
            return False  # computing a layer above computes these too
        self.seen.add((below, block))
        if below > DISK:
            if world.spare[HOST] < 1:
                return False  # it cannot pass through the host
            world.spare[HOST] -= 1
        self.moving.append(block)
        made = self.make(below, 0 if stored_below else 1)
        self.moving.pop()
        if not made:
            return False
        world.present[below].add(block)
        world.idle_blocks[below].discard(block)
        world.layers[below][block] = joined
        return True

    def _drop(self, tier, block):
        """A last copy goes; False if it cannot.

        A leaf goes from all tiers; when dropping, all blocks after it do as well.
        """
        world = self.world
        if world.holes:
            self._leave(tier, block, "dropped")
            return True
        tiers = range(len(world.present))
        everywhere = set().union(*world.present)
        gone = {block}
        if self.dropping:
            gone |= {other for other in everywhere if other[: len(block)] == block}
        for each in gone:
            quiet = all(each in world.idle_blocks[t] for t in tiers if each in world.present[t])
            stay = set(world.children(each, everywhere)) - gone
            if not quiet or each in world.pinned or each in self.moving or stay:
                return False
        for each in sorted(gone, key=lambda each: (-len(each), world.number[each])):
            for at in tiers:
                if each in world.present[at]:
                    self.seen.add((at, each))
                    self._leave(at, each, "dropped")
        return True

    def _leave(self, tier, block, reason):
        self.log.append((tier, block, reason))
        self.world.layers[tier].pop(block, None)
        for each in (self.world.present, self.world.idle_blocks, self.world.bad):
            each[tier].discard(block)
        self.world.spare[tier] += 1
        self.free[tier] |= self.world.may_leave(tier)


def make_room(world, wanted, stay, now):
    """The log of evictions that frees the wanted slots of tiers, [(tier, slots)], in this order;
    None if none does.

    Victims that can be dropped are dropped if writing them down does not make enough room.
    """
    if all(not n or n + world.reserve(tier) <= world.spare[tier] for tier, n in wanted):
        return []
    for dropping in (False, True):
        room = Room(world, now, stay, dropping=dropping)
        if all(room.make(tier, units) for tier, units in wanted):
            return room.log
    return None


def room_to_load(world, units, loads, now):
    """The log of evictions of a request that wants `units` slots of the first tier and loads these
    copies, (tier, block). Those from below the host pass through it, one by one if need be."""
    passing = sum(tier > HOST for tier, _ in loads)
    ways = [[(HOST, passing), (0, units)], [(HOST, 1), (0, units)]] if passing else [[(0, units)]]
    logs = (make_room(world, wanted, loads, now) for wanted in ways)
    return next((log for log in logs if log is not None), None)
