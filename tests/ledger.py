"""The books of a machine that drives a manager at random: its leases, and what must hold.

`check` runs after every operation and compares all that can be seen with what the oracle says.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from fractions import Fraction

import pytest
from oracle import ALPHA, BETA, CONSTANT, READ, UNKNOWN, Room
from witness import LAYERS, Witness

NO_SLOT = 2**32 - 1
NORMAL = 35  # the priority of a block without a hint
MOST_STORES = 3  # of a block may fail until it is used again
ALL = frozenset(range(LAYERS))
MIX = Counter()


@dataclass(slots=True)
class Held:
    """State of a lease.

    Attributes:
        id: the lease's.
        prompt: what it was acquired for.
        tokens: what it holds of that, and what was committed since.
        began: when it was acquired, forked or resumed.
        suspended: it holds nothing but tokens.
        shared: its partial block stands in a slot that forks may share.
        cut: the block whose front is its partial block, if that is stored.
        table: its block table after the last operation.
        late: the most blocks that `lease.load` may still find; until then no tier counts them.
    """

    id: int
    prompt: list[int]
    tokens: list[int]
    began: int
    suspended: bool = False
    shared: bool = False
    cut: tuple | None = None
    table: list[int] = field(default_factory=list)
    late: int = 0


def lasts(claim, now):
    """Whether a claim has not ended."""
    return claim[1] is None or claim[1] > now


class Ledger:
    """Two managers in step, their leases, and the world as it was after the last operation."""

    def start(self, shape):
        self.shape = shape
        self.size = shape.block_tokens
        self.witness = Witness(shape)
        self.claims = {}  # handle -> owner -> (priority, end); what is released has no owner
        self.now = 10
        self.calls = 0
        self.held = {}
        self.past = [[]]
        self.access = {}
        self.uses = {}
        self.owner = {}  # block -> the lease that used it last
        self.last = {}  # lease -> its last use of anything
        self.requests = 0
        self.counting = False  # the operation under way is the last of them
        self.brought = {}  # (tier, block) -> handle, how many requests there were when it came
        self.made = set()  # blocks that the operation under way has committed
        self.taken = Counter()  # stores that went well, by tier
        self.refusals = {}  # tier, block -> stores that failed since its last use, `taken` then
        self.ended = []
        self.events = []
        self.look()

    @property
    def now(self):
        return self._now

    @now.setter
    def now(self, now):
        """Time passes, whether the call that follows goes through or not."""
        self._now = now
        for manager in self.witness.managers:
            manager.hint([], now=now)

    # ------------------------------------------------------------------------ while operating

    def call(self, name, operation):
        """Run an operation on both managers and count how it ended."""
        result, error = self.witness.both(operation)
        self.calls += 1
        MIX[name] += 1
        MIX["operations"] += 1
        if error is not None:
            MIX[type(error).__name__] += 1
        return result, error

    def lease(self, held):
        return self.witness.managers[0].lease(held.id)

    def pick(self, number):
        """One of the leases."""
        return list(self.held.values())[number % len(self.held)]

    def startable(self, number):
        """A move that has failed neither itself nor waits for another; None if there is none."""
        flights = self.witness.flights
        moves = [m for m, f in flights.items() if not f.failed and f.move.after not in flights]
        return moves[number % len(moves)] if moves else None

    def touch(self, path, held, *, uses=1):
        """Blocks are used now; by a lease, if that makes its session younger.

        When a lease ends that counts as no further use.
        """
        self.access.update(dict.fromkeys(path, self.now))
        for block in path:
            self.uses[block] = self.uses.get(block, 0) + uses
        if held is not None:
            self.age(held, path, self.now)
        for tier, block in list(self.refusals):
            if block in path:
                self.refusals[tier, block] = 0, self.refusals[tier, block][1]

    def age(self, held, path, at):
        """The session of these blocks is this lease's now, and as old as this use."""
        known = self.witness.living.keys() | self.made
        self.owner = {block: lease for block, lease in self.owner.items() if block in known}
        if held.id not in self.owner.values():
            self.last.pop(held.id, None)
        self.owner.update(dict.fromkeys(path, held.id))
        if path or held.id in self.last:
            self.last[held.id] = max(at, self.last.get(held.id, 0))

    def ages(self):
        """When each block was last used, as the policy sees it."""
        if self.shape.policy != "checkerboard":
            return self.access
        return self.access | {block: self.last[lease] for block, lease in self.owner.items()}

    def use(self, path):
        """A request uses these blocks: they are not over."""
        for block in path:
            self.claims.get(self.witness.living.get(block), {}).pop(None, None)

    def extend(self, held, tokens, new):
        """Tokens were committed: of the blocks that became full those that were known are used
        now, the new ones, of which these are the handles, when the request began."""
        full = len(held.tokens) // self.size
        held.tokens = held.tokens + tokens
        held.shared &= not tokens
        path = self.witness.path(held.tokens)[full:]
        known = [block for block in path if block in self.witness.living or block in self.made]
        self.touch(known, None)
        self.made.update(path)
        self.use(known)
        self.access.update(dict.fromkeys(path[len(known) :], held.began))
        self.uses.update(dict.fromkeys(path[len(known) :], 1))
        self.age(held, path, held.began)
        # After a lost block no lookup finds them.
        self.witness.meet(zip(new, path[len(known) :], strict=True))
        self.past.append(held.tokens)

    def stays(self, path):
        """The blocks of a path that leave the first tier from slots that no lease or load has."""
        promised = {
            slot for held in self.held.values() if not held.suspended for slot in held.table
        }
        flights = self.witness.flights.values()
        promised |= {flight.move.dst_slot for flight in flights if flight.move.dst == 0}
        leaving = self.witness.leaving
        return {b for b in path if (0, b) in leaving and leaving[0, b].slot not in promised}

    def wanted(self, path, rest):
        """Slots of the first tier for a path, and `rest` tokens after it."""
        stays = self.stays(path)
        lacking = sum(self.world.layers[0].get(b) != ALL for b in path if b not in stays)
        return lacking - (-rest // self.size)

    def entered(self, path):
        """The world for a request that finds a path: its blocks are pinned, and what leaves and
        stays takes no slot that came free."""
        spare = [self.world.spare[0] - len(self.stays(path)), *self.world.spare[1:]]
        return replace(self.world, pinned=self.world.pinned | set(path), spare=spare)

    def loaded(self, held, path):
        """The copies that the plan of a lease reads on lower tiers."""
        spans = [span for span in self.lease(held).plan.spans if span.action == "load"]
        return {
            (span.tier, block)
            for span in spans
            for block in path[span.start // self.size : span.stop // self.size]
        }

    def pinned(self):
        """The blocks that leases hold."""
        active = [held for held in self.held.values() if not held.suspended]
        cut = {held.cut for held in active} - {None}
        return cut.union(*(self.witness.path(held.tokens) for held in active))

    # ------------------------------------------------------------------------ after operating

    def unchanged(self, before):
        """A call that was refused has changed nothing."""
        assert self.witness.snapshot() == before
        assert not self.logged()

    def logged(self):
        """The log of evictions since the last call: (tier, block, reason)."""
        rows = [
            [
                (event.tier, self.witness.names[event.block], event.reason)
                for event in manager.take_events()
                if event.at == self.now
                and event.cause != "failed"
                and event.to == (event.tier + 1 if event.reason == "demoted" else None)
            ]
            for manager in self.witness.managers
        ]
        assert rows[0] == rows[1]
        return rows[0]

    def check(self, subject=None, log=()):
        """Compare everything with the books.

        Args:
            subject: the lease that the operation was about, whose table may have grown.
            log: the evictions that were foretold; None if they were not.
        """
        witness, before, known = self.witness, self.world, self.known
        self.made.clear()
        rows = [[(f.lease, f.start, f.stop) for f in m.failed()] for m in witness.managers]
        assert rows[0] == rows[1]
        self.follow({lease for lease, _, _ in rows[0]})
        self.events = self.logged()
        for manager in witness.managers:
            manager.audit()
        self.look()
        assert witness.snapshot()
        foretold = known and self.world.foretold
        if foretold and log is not None:
            MIX["evictions foretold"] += len(self.events)
            same = sorted(self.events) == sorted(log) and fronts(self.events) == fronts(log)
            assert same, f"foretold {log}, seen {self.events}"
        elif foretold:
            self.least(before)
        self.check_tables(subject, {lease for lease, _, _ in rows[0]})
        self.check_slots()
        self.check_counts()
        self.check_order()
        if not self.shape.holes:
            self.check_leaves()

    def look(self):
        for held in self.held.values():
            self.witness.learn(held.tokens, self.now)
        self.witness.look(self.now)
        self.known = self.witness.all_known()
        living = self.witness.living
        self.refusals = {at: how for at, how in self.refusals.items() if at[1] in living}
        self.claims = {
            handle: {owner: claim for owner, claim in claims.items() if lasts(claim, self.now)}
            for handle, claims in self.claims.items()
            if handle in living.values()
        }
        said = {handle: list(claims.values()) for handle, claims in self.claims.items()}
        brought = {at: number for at, (_, number) in self.brought.items()}
        see = self.witness.world
        self.world = see(self.pinned(), self.ages(), self.uses, brought, self.unwritable(), said)
        self.bring(living)

    def bring(self, living):
        """Number new copies by the last request; below the first tier by the one before, if the
        last one is under way: it counts only after it has made room."""
        known, self.brought = self.brought, {}
        # A copy may go to make room for a store of the same block.
        left = {(tier, block) for tier, block, _ in self.events}
        for tier, present in enumerate(self.world.present):
            for block in present:
                handle, number = known.get((tier, block), (None, 0))
                if handle != living[block] or (tier, block) in left:
                    number = self.requests - (self.counting and tier > 0)
                self.brought[tier, block] = living[block], number
                self.world.brought[tier, block] = number

    def unwritable(self):
        """The copies that are dropped instead of written: (tier below, block)."""
        return {
            (tier, block)
            for (tier, block), (times, taken) in self.refusals.items()
            if times == MOST_STORES or taken == self.taken[tier]
        }

    def refused(self, block, tier):
        """A store of a block to a tier failed."""
        times, _ = self.refusals.get((tier, block), (0, 0))
        self.refusals[tier, block] = times + 1, self.taken[tier]

    def follow(self, failed):
        """Leases that lost tokens to a failure hold less; no other one does."""
        for held in self.held.values():
            tokens = self.lease(held).tokens
            if held.id in failed and tokens < len(held.tokens):
                if held.cut is not None or len(held.tokens) % self.size:
                    held.shared, held.cut = False, None
                held.tokens = held.tokens[:tokens]
            assert tokens == len(held.tokens)

    def least(self, before):
        """A failure made room: of what could leave before and after, the least valuable left."""
        stayed = before.may_leave(0) & self.world.may_leave(0)
        for block in [block for tier, block, _ in self.events if tier == 0]:
            mine = before.order(0, block, self.now)
            for other in stayed:
                if before.order(0, other, self.now) < mine:
                    room = Room(before, self.now)
                    room.decide(0, other)
                    # It may stay though room was made for it below: not enough.
                    could = any(left[:2] == (0, other) for left in room.log)
                    assert not could, f"{block} left before {other}, which is worth less"

    def check_tables(self, subject, failed):
        """The slots of a lease stay where they are, unless the lease was notified."""
        for held in self.held.values():
            if held.suspended:
                continue
            table = self.lease(held).slots(0).tolist()
            full = len(held.tokens) // self.size
            if held.id == subject:
                kept = min(full, len(held.table))
                assert table[:kept] == held.table[:kept]
            elif held.table and held.id not in failed:
                assert table == held.table
            assert len(table) >= full
            held.table = table

    def check_slots(self):
        """Every slot is free or explained by exactly what can be seen to hold it."""
        witness = self.witness
        stats = witness.managers[0].stats()
        assert stats.leases == len(self.held)
        tables = [set(held.table) for held in self.held.values() if not held.suspended]
        for tier, counters in enumerate(stats.tiers.values()):
            seen = {block for at, block in witness.copies if at == tier}
            hidden = {block for at, block in witness.hidden() if at == tier}
            # No lookup finds blocks that a lease wrote after a lost block, but the lease's table
            # has them.
            seen |= hidden - self.pinned() if tier == 0 else hidden
            slots = {witness.slots[tier, block] for block in seen}
            assert len(slots) == len(seen)
            if tier == 0:
                slots = slots.union(*tables)
            slots.discard(NO_SLOT)
            read = set()  # by moves that failed and may hang: what they read is of no use
            for flight in witness.flights.values():
                move = flight.move
                if move.dst == tier:
                    slots.add(move.dst_slot)
                if move.src == tier:
                    (read if flight.failed else slots).add(move.src_slot)
            assert counters.free + len(slots) <= counters.slots
            if self.known:
                assert counters.free + len(slots | read) >= counters.slots

    def check_counts(self):
        """Every count has its parts, and a look at every block finds as many copies."""
        stats = self.witness.managers[0].stats()
        first = next(iter(stats.tiers.values()))
        undecided = stats.blocks_wanted - first.hits - first.misses
        assert 0 <= undecided <= sum(held.late for held in self.held.values())
        rest = stats.blocks_wanted - undecided
        for at, tier in enumerate(stats.tiers.values()):
            rest -= tier.hits
            assert (tier.misses, tier.hit_age.count) == (rest, tier.hits)
            assert tier.evicted == sum(tier.evictions.values()) == tier.evict_age.count
            assert tier.evicted == tier.evicted_clean + tier.evicted_dirty + tier.dropped
            complete = [
                (copy.layer_lo, copy.layer_hi) == (copy.coming_lo, copy.coming_hi)
                for (where, _), copy in self.witness.copies.items()
                if where == at
            ]
            hidden = [
                len(self.world.layers[where][block]) > 0
                for where, block in self.witness.hidden()
                if where == at
            ]
            failed = any(f.failed for f in self.witness.flights.values())
            if self.known and not failed and not self.cut_off():
                assert tier.copies == sum(complete) + sum(hidden)
                assert tier.retained == sum(
                    self.world.priority(block, self.now) > NORMAL
                    for block in self.world.present[at]
                )
            assert tier.compared > 0
            assert tier.regrets == 0 or self.shape.epsilon > 0

    def cut_off(self):
        """Whether a move or a lease has blocks after a lost block, which no lookup finds."""
        touched = {flight.block for flight in self.witness.flights.values()} - {None}
        touched |= self.pinned()
        return not self.shape.holes and any(
            frozenset().union(*(tier.get(front, ()) for tier in self.world.layers)) != ALL
            for block in touched
            for front in self.witness.path(block[: -self.size])
        )

    def check_order(self):
        """Candidates for eviction, their costs and their ranks agree with the oracle."""
        world = self.world
        for (tier, block), entry in self.witness.entries.items():
            idle = self.now - world.access[block]
            assert entry.idle == idle
            assert entry.priority == world.priority(block, self.now)
            self.check_price(tier, block, entry, idle)
        if not world.foretold:
            return
        for tier in range(len(self.shape.rooms)):
            ranks = {
                block: entry.rank
                for (at, block), entry in self.witness.entries.items()
                if at == tier and entry.rank is not None
            }
            allowed = world.may_leave(tier)
            assert ranks.keys() <= allowed
            if self.known and not self.cut_off():
                order = sorted(allowed, key=lambda block: world.order(tier, block, self.now))
                assert sorted(ranks, key=ranks.get) == order

    def check_price(self, tier, block, entry, idle):
        """Explanation of a copy."""
        world, policy = self.world, self.shape.policy
        depth = world.depth(block)
        if policy == "weighted":
            # The shortest session through it has `blocks` blocks; a block of all layers weighs
            # as its layers do.
            blocks = (depth + 1) / entry.weights["position"]
            assert blocks >= depth + 1
            assert blocks == pytest.approx(round(blocks), rel=1e-12)
            base = float(ALPHA * depth * self.size + BETA + CONSTANT)
            assert entry.terms["base"] == base
            cost = base * entry.weights["layer"] * entry.weights["position"]
            assert entry.cost == pytest.approx(cost, rel=1e-12)
        elif policy not in READ | UNKNOWN:
            assert entry.cost == world.cost(tier, block)
        if policy == "fifo":
            assert entry.value == world.brought[tier, block]
        elif policy == "lfu":
            assert entry.value == world.uses[block]
        elif world.foretold:
            cost = Fraction(world.cost(tier, block))
            expected = float(cost * 10**9 / idle) if idle else float("inf")
            assert entry.value == pytest.approx(expected, rel=1e-12)

    def check_leaves(self):
        """Leaf-only: if a tier has a block, tiers have all blocks before it in the sequence.

        Blocks cut off by a failure leave when the moves that touch them have ended, and the leases
        that go through the lost block.
        """
        touched = {flight.block for flight in self.witness.flights.values()}
        pinned = self.pinned()
        for block in set().union(*self.world.present) - touched:
            parent = block[: -self.size]
            whole = frozenset().union(*(tier.get(parent, ()) for tier in self.world.layers))
            fine = not parent or parent in pinned or whole == ALL
            assert fine, f"{block} stands behind a hole"

    def check_failure(self, before, flight):
        """Copies that were usable before a move failed still are, but for those that it names.

        Layers brought by a hung move are not usable, as the move may write them again. The first
        tier keeps no layer of a block that did not load completely.
        """
        move = flight.move
        void = move.dst == 0 or move.id in self.witness.flights
        for (tier, block), copy in before.items():
            source = move.kind == 0 and (tier, block) == (move.src, flight.block)
            target = not flight.own and (tier, block) == (move.dst, flight.block)
            left = any((tier, block) == (at, gone) for at, gone, _ in self.events)
            lost = not self.shape.holes and any(
                frozenset().union(*(each.get(front, ()) for each in self.world.layers)) != ALL
                for front in self.witness.path(block)
            )
            if source or left or lost or copy.layer_lo == copy.layer_hi:
                continue
            if target and void and copy.layer_lo == move.layer_lo:
                now = self.witness.copies.get((tier, block))
                assert now is None or now.layer_lo == now.layer_hi
                continue
            now = self.witness.copies[tier, block]
            assert now.slot == copy.slot
            assert now.layer_lo <= copy.layer_lo
            assert now.layer_hi >= copy.layer_hi


def fronts(log):
    """The evictions in order, without what was dropped with a block before it.

    The oracle does not predict the order of two such blocks with the same parent.
    """
    dropped = {block for _, block, reason in log if reason == "dropped"}
    behind = [
        reason == "dropped" and any(block[:at] in dropped for at in range(1, len(block)))
        for _, block, reason in log
    ]
    return [event for event, late in zip(log, behind, strict=True) if not late]
