"""The state of a manager as seen from outside, by calls that change nothing.

Two managers of one shape live in step: every operation runs on both and must end alike. Lookups
and explanations give the blocks of each tier, and the moves handed out give those in flight.
A block is named by all tokens up to its end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
from oracle import ALPHA, BETA, CONSTANT, World

from kvtrie import BlockManager, ConfigError, Cost, KvtrieError, ModelShape, Tier

LAYERS = 2
LOAD, STORE, COPY = range(3)


@dataclass(frozen=True, slots=True)
class Shape:
    """The settings of a manager that vary."""

    rooms: tuple[int, ...]
    holes: bool
    policy: str
    block_tokens: int = 2
    epsilon: float = 0.0

    def open(self):
        kinds = zip(("gpu", "host", "disk", "remote"), self.rooms, strict=False)
        tiers = [Tier(kind, blocks=room, retained_share=1.0) for kind, room in kinds]
        return BlockManager(
            ModelShape(layers=LAYERS, kv_heads=1, head_dim=1, fingerprint="witness"),
            tiers,
            block_tokens=self.block_tokens,
            policy=self.policy,
            cost=Cost(float(ALPHA), float(BETA), float(CONSTANT), ns_per_token=20_000.0),
            structure="holes" if self.holes else "leaf-only",
            events=10_000,
            reuse=False,
            epsilon=self.epsilon,
        )


@dataclass(slots=True)
class Flight:
    """A move that was handed out and has not ended."""

    move: object
    block: tuple | None
    own: bool  # it writes a slot of a lease's own, not the block's
    failed: bool = False
    returned: bool | None = None  # its block is back in the slot that it was to leave

    def passes(self):
        """Whether it is a store from the host of what came there from the disk for it."""
        return self.move.kind == STORE and self.move.src != self.move.dst - 1

    def source(self):
        """The tier that its block leaves."""
        return self.move.dst - 1 if self.move.kind == STORE else self.move.src


@dataclass(slots=True)
class Witness:
    """Two managers in step, and what was last seen of them."""

    shape: Shape
    managers: list[BlockManager] = field(init=False)
    names: dict[int, tuple] = field(default_factory=dict)  # of every handle ever seen
    living: dict[tuple, int] = field(default_factory=dict)  # handle of every cached block
    copies: dict[tuple, object] = field(default_factory=dict)  # (tier, block) -> Copy
    leaving: dict[tuple, object] = field(default_factory=dict)  # the same of those that leave
    slots: dict[tuple, int] = field(default_factory=dict)  # (tier, block) -> slot last seen
    entries: dict[tuple, object] = field(default_factory=dict)  # (tier, block) -> Explanation
    flights: dict[int, Flight] = field(default_factory=dict)

    def __post_init__(self):
        self.managers = [self.shape.open(), self.shape.open()]

    def both(self, operation):
        """Run an operation on both managers. Returns what it returned, and its error."""
        ends = []
        for manager in self.managers:
            try:
                ends.append((operation(manager), None))
            except KvtrieError as error:
                ends.append((None, error))
        (first, error), (_, other) = ends
        assert (type(error), str(error)) == (type(other), str(other))
        return first, error

    def snapshot(self):
        first, second = (manager.snapshot() for manager in self.managers)
        assert first == second
        return first

    def lookup(self, tokens, now, keep=0):
        return self.managers[0].lookup(np.array(tokens, dtype=np.uint32), now=now, keep=keep)

    def path(self, tokens):
        """The names of all full blocks of a sequence."""
        size = self.shape.block_tokens
        return [tuple(tokens[:end]) for end in range(size, len(tokens) + 1, size)]

    def learn(self, tokens, now):
        """Learn the handles of the blocks of a sequence."""
        handles = self.lookup(tokens, now).handles.tolist()
        self.meet(zip(handles, self.path(tokens), strict=False))

    def meet(self, blocks):
        """Blocks are known by these handles."""
        for handle, block in blocks:
            self.names[handle] = block
            self.living[block] = handle

    def look(self, now):
        """See all residencies again, and take the moves, byte for byte the same on both."""
        manager = self.managers[0]
        self.living = {b: handle for b, handle in self.living.items() if cached(manager, handle)}
        self.copies.clear()
        self.leaving.clear()
        self.entries.clear()
        inner = {block[: -self.shape.block_tokens] for block in self.living}
        for leaf in self.living.keys() - inner:
            for block, found in zip(self.path(leaf), self.lookup(leaf, now).blocks, strict=False):
                for copy in found.copies:
                    (self.leaving if copy.leaving else self.copies)[copy.tier, block] = copy
                    self.slots[copy.tier, block] = copy.slot
        for block, handle in self.living.items():
            for tier in range(len(self.shape.rooms)):
                entry = explained(manager, handle, tier, now)
                if entry is not None:
                    self.entries[tier, block] = entry
        self.see_returned()
        first, second = (manager.moves() for manager in self.managers)
        assert first.to_bytes() == second.to_bytes()
        for move in first:
            block = self.names.get(move.block)
            copy = self.copies.get((move.dst, block))
            own = copy is None or copy.slot != move.dst_slot
            self.flights[move.id] = Flight(move, block, own)

    def see_returned(self):
        """See which stores read a slot that its block has come back to."""
        for flight in self.flights.values():
            if flight.failed and flight.returned is None:
                source = flight.source(), flight.block
                copy = self.copies.get(source)
                # No lookup finds what a failure has cut off; with an entry it is back too.
                hidden = copy is None and source in self.entries
                same = flight.passes() or (copy and copy.slot == flight.move.src_slot)
                flight.returned = hidden or bool(copy and same)
            elif flight.move.kind == STORE and not flight.failed and not flight.returned:
                # A request has taken its block back before the slot was promised.
                copy = self.copies.get((flight.move.src, flight.block))
                stays = copy is not None and copy.slot == flight.move.src_slot
                flight.returned = stays or None

    def give_up(self, move):
        """Moves that wait for a failed move have failed with it, and never started."""
        for other in [other for other, f in self.flights.items() if f.move.after == move]:
            del self.flights[other]
            self.give_up(other)

    def all_known(self):
        """Whether every move that has not ended was handed out."""
        return self.managers[0].stats().moves == len(self.flights)

    def moving(self, tier, block):
        """Whether a move reads or writes what a tier holds of a block."""
        slot = self.slots.get((tier, block))
        return any(
            (flight.move.dst == tier and not flight.own)
            or (
                (flight.move.src, flight.move.src_slot) == (tier, slot)
                and (flight.move.kind != STORE or flight.returned)
            )
            for flight in self.flights.values()
            if flight.block == block
        )

    def hidden(self):
        """(tier, block) of copies that no lookup finds: bad, or cut off by a failure."""
        return self.entries.keys() - self.copies.keys()

    def prices(self):
        """Explanations of blocks, by (tier, block), where the oracle reads them."""
        return {at: entry.cost for at, entry in self.entries.items()}

    def world(self, pinned, access, uses, brought, unwritable, said):
        """Inputs of the oracle."""
        tiers = range(len(self.shape.rooms))
        layers = [{} for _ in tiers]
        for (tier, block), copy in self.copies.items():
            layers[tier][block] = frozenset(range(copy.coming_lo, copy.coming_hi))
        for tier, block in self.hidden():
            where = self.managers[0].layer_tiers(self.living[block])
            layers[tier][block] = frozenset(np.flatnonzero(where == tier).tolist())
        coming = {(f.move.dst, f.block) for f in self.flights.values() if not f.own}
        seen = self.copies.keys() | self.entries.keys() | coming
        present = [{b for t, b in seen if t == tier} for tier in tiers]
        idle_blocks = [
            {b for b in present[t] if (t, b) in self.entries and not self.moving(t, b)}
            for t in tiers
        ]
        stats = self.managers[0].stats().tiers.values()
        return World(
            self.shape.block_tokens,
            self.shape.policy,
            Fraction(self.shape.epsilon),
            self.shape.holes,
            whole=frozenset(range(LAYERS)),
            rooms=self.shape.rooms,
            layers=layers,
            present=present,
            idle_blocks=idle_blocks,
            bad=[{b for b in idle_blocks[t] if not layers[t].get(b)} for t in tiers],
            pinned=pinned,
            access={block: access[block] for block in self.living},
            uses={block: uses[block] for block in self.living},
            brought=brought,
            prices=self.prices(),
            number={block: handle & 0xFFFF_FFFF for block, handle in self.living.items()},
            spare=[each.free + each.coming for each in stats],
            unwritable={(tier, block) for tier, block in unwritable if block in self.living},
            said={block: said[handle] for block, handle in self.living.items() if handle in said},
        )


def cached(manager, handle):
    """Whether a block is still known."""
    try:
        manager.layer_tiers(handle)
    except ConfigError:
        return False
    return True


def explained(manager, handle, tier, now):
    """The explanation of a block on a tier; None if the tier holds nothing of it."""
    try:
        return manager.explain(handle, tier=tier, now=now)
    except ConfigError:
        return None
