"""What can be seen of a manager from outside, by calls that change nothing.

Two managers of one shape live in step: every operation runs on both, and must end alike. What
stands where is read by lookups and explanations; what moves is known from the moves handed out.
Blocks are named by all tokens up to their end.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from oracle import ALPHA, BETA, CONSTANT, World

from kvtrie import BlockManager, ConfigError, Cost, KvtrieError, ModelShape, Tier

NO_SLOT = 2**32 - 1
LOAD, STORE = 0, 1


@dataclass(frozen=True, slots=True)
class Shape:
    """The settings of a manager that vary."""

    rooms: tuple[int, ...]
    holes: bool
    policy: str
    layer_slots: int = 0  # so many tiers, from the first one on, have a slot per layer
    layers: int = 2
    block_tokens: int = 2

    def open(self):
        kinds = ("gpu", "host", "disk", "remote")
        tiers = [
            Tier(kind, blocks=room, layer_slots=at < self.layer_slots)
            for at, (kind, room) in enumerate(zip(kinds, self.rooms, strict=False))
        ]
        return BlockManager(
            ModelShape(layers=self.layers, kv_heads=1, head_dim=1),
            tiers,
            block_tokens=self.block_tokens,
            policy=self.policy,
            cost=Cost(float(ALPHA), float(BETA), float(CONSTANT), ns_per_token=1.0),
            structure="holes" if self.holes else "leaf-only",
            events=10_000,
            reuse=False,
        )


@dataclass(slots=True)
class Flight:
    """A move that was handed out and has not ended."""

    move: object
    block: tuple | None
    own: bool  # it brings a block into a slot of a lease's own
    failed: bool = False


@dataclass(slots=True)
class Witness:
    """Two managers in step, and what was seen of the first."""

    shape: Shape
    managers: list[BlockManager] = field(init=False)
    names: dict[int, tuple] = field(default_factory=dict)  # block handle -> its tokens
    living: dict[tuple, int] = field(default_factory=dict)  # the other way round, if cached
    copies: dict[tuple, object] = field(default_factory=dict)  # (tier, block) -> Copy
    slots: dict[tuple, int] = field(default_factory=dict)  # (tier, block) -> slot last seen
    entries: dict[tuple, object] = field(default_factory=dict)  # (tier, block) -> Explanation
    flights: dict[int, Flight] = field(default_factory=dict)

    def __post_init__(self):
        self.managers = [self.shape.open(), self.shape.open()]

    def both(self, operation):
        """Run an operation on both managers: the same result or the same error."""
        results = []
        for manager in self.managers:
            try:
                results.append((operation(manager), None))
            except KvtrieError as error:
                results.append((None, error))
        (first, error), (_, other) = results
        assert (type(error), str(error)) == (type(other), str(other))
        return first, error

    def snapshot(self):
        first, second = (manager.snapshot() for manager in self.managers)
        assert first == second
        return first

    def lookup(self, tokens, now):
        return self.managers[0].lookup(np.array(tokens, dtype=np.uint32), now=now, keep=0)

    def learn(self, tokens, now):
        """Learn the names of the blocks of a sequence."""
        size = self.shape.block_tokens
        for at, handle in enumerate(self.lookup(tokens, now).handles.tolist(), 1):
            self.names[handle] = tuple(tokens[: at * size])
            self.living[self.names[handle]] = handle

    def look(self, now):
        """See again what stands where."""
        manager = self.managers[0]
        self.living = {block: handle for block, handle in self.living.items() if alive(manager, handle)}
        self.copies.clear()
        self.entries.clear()
        size = self.shape.block_tokens
        inner = {block[:-size] for block in self.living}
        for leaf in self.living.keys() - inner:
            for at, found in enumerate(self.lookup(leaf, now).blocks, 1):
                for copy in found.copies:
                    self.copies[copy.tier, leaf[: at * size]] = copy
                    self.slots[copy.tier, leaf[: at * size]] = copy.slot
        for block, handle in self.living.items():
            for tier in range(len(self.shape.rooms)):
                try:
                    entry = manager.explain(handle, now=now, tier=tier)
                except ConfigError:
                    continue
                self.entries[tier, block] = entry

    def take(self):
        """Take the moves of both managers, which must be the same byte for byte."""
        first, second = (manager.moves() for manager in self.managers)
        assert first.to_bytes() == second.to_bytes()
        for move in first:
            block = self.names.get(move.block)
            copy = self.copies.get((move.dst, block))
            own = copy is None or copy.slot != move.dst_slot
            self.flights[move.id] = Flight(move, block, own)

    def land(self, move):
        """A move has ended, and with it, if it failed, all that waited for it."""
        flight = self.flights.pop(move)
        if flight.failed:
            return
        for other in [id_ for id_, f in self.flights.items() if f.move.after == move]:
            self.fail(other)
            self.flights.pop(other, None)

    def moving(self, tier, block):
        """Whether a move reads or writes what a tier holds of a block."""
        slot = self.slots.get((tier, block))
        for flight in self.flights.values():
            move = flight.move
            if flight.block != block:
                continue
            if move.dst == tier and not flight.own:
                return True
            if move.src == tier and move.src_slot == slot:
                return True
        return False

    def world(self, pinned, access, unwritable):
        """What the oracle is told, at this moment."""
        tiers = range(len(self.shape.rooms))
        layers = [{} for _ in tiers]
        for (tier, block), copy in self.copies.items():
            layers[tier][block] = frozenset(range(copy.coming_lo, copy.coming_hi))
        seen = self.copies.keys() | self.entries.keys()
        arriving = {(f.move.dst, f.block) for f in self.flights.values() if not f.own}
        present = [{b for t, b in seen | arriving if t == tier and b} for tier in tiers]
        settled = [
            {b for b in present[t] if (t, b) in self.entries and not self.moving(t, b)}
            for t in tiers
        ]
        stats = self.managers[0].stats()["tiers"].values()
        return World(
            self.shape.block_tokens,
            self.shape.policy,
            self.shape.holes,
            layers=layers,
            present=present,
            settled=settled,
            bad=[{b for b in settled[t] if (t, b) not in self.copies} for t in tiers],
            pinned=set(pinned),
            access=dict(access),
            spare=[each["free"] + each["coming"] for each in stats],
            unwritable=set(unwritable),
        )


def alive(manager, handle):
    """Whether a block is still cached."""
    try:
        manager.layer_tiers(handle)
    except ConfigError:
        return False
    return True
