"""A manager driven at random through Python, compared with an oracle that predicts every eviction.

After each operation: leased blocks are where they were, slots are conserved, what may leave and in
which order is what the oracle says, leaf-only has no hole, a refused call has changed nothing, and
a second manager that got the same calls has asked for the same moves, byte for byte.
`make fuzz` runs it with the profile `deep` and prints how often each thing happened.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from ledger import MIX, Held, Ledger
from oracle import Room, make_room, room_to_load
from witness import STORE, Shape

from kvtrie import ClosedError, ConfigError, NoSpaceError, Prefetch, Release, Retain

POLICIES = [
    "lru",
    "fifo",
    "lfu",
    "learned",
    "retention",
    "flat",
    "weighted",
    "checkerboard",
    "restore",
]
SHAPES = st.builds(
    Shape,
    rooms=st.sampled_from(
        [
            (5,),
            (7,),
            (5, 3),
            (6, 4),
            (4, 9),
            (5, 5),
            (5, 3, 4),
            (4, 4, 3),
            (4, 3, 3, 4),
            (5, 4, 3, 9),
        ]
    ),
    holes=st.booleans(),
    policy=st.sampled_from(POLICIES),
    epsilon=st.sampled_from([0.0, 0.25, 1 / 64]),
)
STEPS = st.sampled_from([0, 1, 2, 5, 1000, 10**6])
PICK = st.integers(0, 30)
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=5)
# A prompt: a part of that earlier sequence, and then these tokens.
PROMPT = st.tuples(PICK, st.sampled_from([0, 2, 4, 6, 99]), st.just([]) | TOKENS | TOKENS)


def leased(machine):
    return bool(machine.held)


def moving(machine):
    return bool(machine.witness.flights)


def entered(committed):
    """Handles of the blocks that entered the trie, and slots of those that were there."""
    return committed.new.tolist(), committed.duplicate.tolist()


class Machine(Ledger, RuleBasedStateMachine):
    """Leases, moves, time and wrong calls."""

    @initialize(shape=SHAPES)
    def open(self, shape):
        self.start(shape)
        MIX[f"managers with {len(shape.rooms)} tiers"] += 1
        MIX[f"managers with {shape.policy}"] += 1
        MIX[f"managers with {'holes' if shape.holes else 'leaf-only'}"] += 1

    # ------------------------------------------------------------------------------- requests

    @rule(
        prompt=PROMPT,
        keep=st.integers(0, 1),
        reserve=st.integers(0, 3),
        load=st.sampled_from(["plan", "all", "none"]),
        step=STEPS,
    )
    def acquire(self, prompt, keep, reserve, load, step):
        self.begin(prompt, keep, reserve, load, step)

    def begin(self, prompt, keep, reserve, load, step):
        """The lease of a prompt; None if there is no room."""
        base, cut, fresh = prompt
        prompt = self.past[base % len(self.past)][:cut] + fresh
        self.now += step
        found = self.witness.lookup(prompt, self.now, keep).tokens
        path = self.witness.path(prompt[:found])
        units = self.wanted(path, len(prompt) - found + reserve)
        world = self.entered(path)
        before = self.witness.snapshot()
        lease, error = self.call(
            "acquire",
            lambda m: m.acquire(prompt, now=self.now, keep=keep, reserve=reserve, load=load).id,
        )
        if not prompt:
            assert isinstance(error, ConfigError)
            self.unchanged(before)
            return None
        if error is not None:
            assert isinstance(error, NoSpaceError)
            self.unchanged(before)
            if load == "none" and self.known and self.world.foretold:
                assert make_room(world, [(0, units)], (), self.now) is None
            return None
        held = self.held[lease] = Held(lease, prompt, prompt[:found], self.now)
        held.late = len(path) if load == "none" else 0
        matched = self.lease(held).matched
        if matched < found:
            # Blocks that would pass through the host have no room there, and no gap is loaded.
            assert len(self.shape.rooms) > 2
            assert (load, self.shape.holes) == ("all", False)
            held.tokens, path = prompt[:matched], path[: matched // self.size]
            units, world = self.wanted(path, len(prompt) - matched + reserve), self.entered(path)
        assert matched <= found
        self.past.append(prompt)
        self.request(held, path, room_to_load(world, units, self.loaded(held, path), self.now))
        return held

    def request(self, held, path, log):
        """A request of a lease has found a path and made room."""
        self.requests, self.counting = self.requests + 1, True
        self.touch(path, held)
        self.use(path)
        self.check(log=log)
        self.counting = False

    @rule(
        prompt=PROMPT,
        load=st.sampled_from(["plan", "all"]),
        ends=st.lists(st.sampled_from(["land", "progress", "fail", "hang"]), max_size=3),
        step=STEPS,
    )
    def serve(self, prompt, load, ends, step):
        """A whole request; its first moves end in different ways, the others well."""
        held = self.begin(prompt, 1, 0, load, step)
        if held is None:
            return
        for number, end in enumerate(ends):
            if end in ("fail", "hang"):
                self.fail(number, end == "hang", step)
            else:
                (self.land if end == "land" else self.progress)(number, step)
        while not self.lease(held).ready():
            self.land_all(0)
        at = list(self.held).index(held.id)
        self.commit(at, rest=True, fresh=[], step=step)
        self.release(at, 0)

    @rule(pick=PICK, rest=st.sampled_from([True, True, False]), fresh=TOKENS, step=STEPS)
    @precondition(leased)
    def commit(self, pick, rest, fresh, step):
        held = self.pick(pick)
        tokens = held.prompt[len(held.tokens) :] if rest else fresh
        self.now += step
        before = self.witness.snapshot()
        lease = self.lease(held)
        ready = not held.suspended and lease.ready()
        fits = not held.suspended and (not tokens or len(tokens) <= lease.room)
        done, error = self.call(
            "commit", lambda m: entered(m.lease(held.id).commit(tokens, now=self.now))
        )
        if error is not None:
            assert isinstance(error, ClosedError if held.suspended else ConfigError)
            assert not (ready and fits), error
            self.unchanged(before)
            return
        assert fits
        new, duplicates = done
        MIX["duplicates"] += len(duplicates)
        self.extend(held, tokens, new)
        self.check()

    @rule(picks=st.lists(PICK, min_size=1, max_size=3), token=st.integers(0, 2), step=STEPS)
    @precondition(leased)
    def commit_many(self, picks, token, step):
        batch = [self.pick(pick) for pick in picks]
        self.now += step
        before = self.witness.snapshot()
        ids, tokens = [held.id for held in batch], [[token]] * len(batch)
        done, error = self.call(
            "commit_many",
            lambda m: [entered(each) for each in m.commit_many(ids, tokens, now=self.now)],
        )
        if error is not None:
            self.unchanged(before)
            return
        assert len(set(ids)) == len(ids)
        for held, (new, _) in zip(batch, done, strict=True):
            self.extend(held, [token], new)
        self.check()

    @rule(pick=PICK, tokens=st.integers(0, 6), step=STEPS)
    @precondition(leased)
    def reserve(self, pick, tokens, step):
        held = self.pick(pick)
        self.now += step
        more = 0
        if tokens and not held.suspended:
            full, tail = divmod(len(held.tokens), self.size)
            adopts = held.shared and self.lease(held).room > 0
            opened = len(held.table) - full - (held.shared or held.cut is not None)
            more = max(0, -(-(tail + tokens) // self.size) - opened - adopts)
        log = make_room(self.world, [(0, more)], (), self.now)
        before = self.witness.snapshot()
        _, error = self.call("reserve", lambda m: m.lease(held.id).reserve(tokens, now=self.now))
        if error is not None:
            assert isinstance(error, ClosedError if held.suspended else NoSpaceError)
            assert held.suspended or log is None or not self.known or not self.world.foretold
            self.unchanged(before)
            return
        if tokens:
            held.shared, held.cut = False, None
        self.check(held.id, log)

    @rule(pick=PICK, step=STEPS)
    @precondition(leased)
    def load(self, pick, step):
        held = self.pick(pick)
        self.now += step
        before = self.witness.snapshot()
        _, error = self.call("load", lambda m: m.lease(held.id).load(now=self.now).tolist())
        through = len(self.shape.rooms) > 2  # loads may need room in the host
        if error is not None:
            assert held.suspended or through
            self.unchanged(before)
            return
        held.table = []  # blocks loaded by another request are used in place
        self.check(log=None if through else ())

    @rule(pick=PICK, step=STEPS)
    @precondition(leased)
    def release(self, pick, step):
        held = self.pick(pick)
        self.now += step
        self.call("release", lambda m: m.lease(held.id).release(now=self.now).tolist())
        del self.held[held.id]
        if not held.suspended:
            self.touch(self.witness.path(held.tokens), held, uses=0)
        self.check()

    # --------------------------------------------------------------------- branches, preemption

    @rule(pick=PICK, n=st.integers(0, 2), step=STEPS)
    @precondition(lambda self: 0 < len(self.held) < 8)
    def fork(self, pick, n, step):
        held = self.pick(pick)
        self.now += step
        before = self.witness.snapshot()
        ids, error = self.call(
            "fork", lambda m: [lease.id for lease in m.lease(held.id).fork(n, now=self.now)]
        )
        if error is not None:
            self.unchanged(before)
            return
        assert len(ids) == n
        held.shared |= len(held.tokens) % self.size > 0 and held.cut is None
        for lease in ids:
            self.held[lease] = replace(held, id=lease, table=[], began=self.now)
        self.check()

    @rule(pick=PICK, cut=PICK, step=STEPS)
    @precondition(leased)
    def truncate(self, pick, cut, step):
        held = self.pick(pick)
        keep = cut % (len(held.tokens) + 2)
        self.now += step
        before = self.witness.snapshot()
        _, error = self.call("truncate", lambda m: m.lease(held.id).truncate(keep, now=self.now))
        if error is not None:
            self.unchanged(before)
            return
        path = self.witness.path(held.tokens)
        full, tail = divmod(keep, self.size)
        if full < len(path):
            held.shared, held.cut = False, path[full] if tail else None
        elif not tail:
            held.shared, held.cut = False, None
        held.tokens = held.tokens[:keep]
        self.check(held.id)

    @rule(pick=PICK, step=STEPS)
    @precondition(leased)
    def suspend(self, pick, step):
        held = self.pick(pick)
        self.now += step
        before = self.witness.snapshot()
        _, error = self.call("suspend", lambda m: m.lease(held.id).suspend(now=self.now))
        if error is not None:
            assert held.suspended or len(self.shape.rooms) == 1
            self.unchanged(before)
            return
        held.suspended, held.shared, held.cut = True, False, None
        held.prompt, held.table = held.tokens, []
        path = self.witness.path(held.tokens)
        self.touch(path, held, uses=0)
        access = {block: self.ages()[block] for block in self.world.access}
        log, world = [], replace(self.world, pinned=self.pinned(), access=access)
        for block in reversed(path):
            if block in world.may_leave(0):
                room = Room(world, self.now)
                room.decide(0, block)
                log, world = log + room.log, room.world
        self.check(log=log)

    @rule(pick=PICK, reserve=st.integers(0, 3), step=STEPS)
    @precondition(lambda self: any(held.suspended for held in self.held.values()))
    def resume(self, pick, reserve, step):
        held = self.pick(pick)
        self.now += step
        found = self.witness.lookup(held.tokens, self.now).tokens
        path = self.witness.path(held.tokens[:found])
        units = self.wanted(path, len(held.tokens) - found + reserve)
        world = self.entered(path)
        before = self.witness.snapshot()
        _, error = self.call(
            "resume", lambda m: repr(m.lease(held.id).resume(reserve, now=self.now))
        )
        if error is not None:
            assert isinstance(error, NoSpaceError if held.suspended else ConfigError)
            self.unchanged(before)
            return
        held.suspended, held.tokens, held.began = False, held.tokens[:found], self.now
        self.request(held, path, room_to_load(world, units, self.loaded(held, path), self.now))

    # ---------------------------------------------------------------------------------- moves

    def landed(self, moves):
        for move in moves:
            flight = self.witness.flights.pop(move)
            self.ended.append(move)
            if flight.move.kind == STORE:
                self.taken[flight.move.dst] += 1
        self.check()

    @rule(pick=PICK, step=STEPS)
    @precondition(moving)
    def land(self, pick, step):
        """One move ends well."""
        move = self.startable(pick)
        if move is not None:
            self.now += step
            ended, _ = self.call("land", lambda m: m.complete([move], now=self.now))
            assert ended == 1
            self.landed([move])

    @rule(step=STEPS)
    @precondition(moving)
    def land_all(self, step):
        """All moves end well that have not failed, in the order of handing out."""
        moves = [move for move, flight in self.witness.flights.items() if not flight.failed]
        self.now += step
        ended, _ = self.call("land_all", lambda m: m.complete(moves, now=self.now))
        assert ended == len(moves)
        self.landed(moves)

    @rule(pick=PICK, step=STEPS)
    @precondition(moving)
    def progress(self, pick, step):
        """The first layer of a move is there."""
        move = self.startable(pick)
        if move is not None:
            self.now += step
            ended, _ = self.call(
                "progress", lambda m: m.complete([move], now=self.now, layers_done=1)
            )
            self.landed([move] if ended else [])

    @rule(pick=PICK, hung=st.booleans(), step=STEPS)
    @precondition(moving)
    def fail(self, pick, hung, step):
        """A move fails; if it hangs, its slots stay out of use until it ends."""
        move = self.startable(pick)
        if move is None:
            return
        self.now += step
        flight, copies = self.witness.flights[move], dict(self.witness.copies)
        self.call(
            "hang" if hung else "fail",
            lambda m: m.complete([move], now=self.now, ok=False, hung=hung, error="torn"),
        )
        flight.failed = True
        behind = [f for f in self.witness.flights.values() if f.move.after == move]
        for store in [flight, *behind]:
            if store.move.kind == STORE and store.block == flight.block:
                self.refused(store.block, store.move.dst)
        self.witness.give_up(move)
        if not hung:
            del self.witness.flights[move]
        self.check(log=None)
        self.check_failure(copies, flight)

    @rule(pick=PICK, step=STEPS)
    @precondition(lambda self: any(f.failed for f in self.witness.flights.values()))
    def end_hung(self, pick, step):
        """A move that hung has ended."""
        hung = [move for move, flight in self.witness.flights.items() if flight.failed]
        move = hung[pick % len(hung)]
        self.now += step
        self.call("end_hung", lambda m: m.complete([move], now=self.now, ok=False))
        del self.witness.flights[move]
        self.check(log=None)

    # ---------------------------------------------------------------------------------- hints

    def hint(self, name, hint):
        replies, error = self.call(
            name,
            lambda m: [
                (r.answer, r.blocks, r.not_applied, r.reason) for r in m.hint([hint], now=self.now)
            ],
        )
        assert error is None
        return replies[0]

    @rule(
        pick=PICK,
        priority=st.sampled_from([0, 20, 35, 50, 80, 100]),
        ttl=st.sampled_from([None, None, 1, 5, 1001, 10**6]),
        owner=st.sampled_from(["a", "b", ""]),
        step=STEPS,
    )
    def retain(self, pick, priority, ttl, owner, step):
        """An owner says how much the cached blocks of a sequence are wanted."""
        tokens = self.past[pick % len(self.past)]
        known = [b for b in self.witness.path(tokens) if b in self.witness.living]
        self.now += step
        if not known:
            return
        retain = Retain(tokens=known[-1], priority=priority, ttl=ttl, owner=owner)
        answer, blocks, left, _ = self.hint("retain", retain)
        assert (answer, blocks, left) == ("accepted", len(known), 0)
        end = None if ttl is None else self.now + ttl
        for block in known:
            self.claims.setdefault(self.witness.living[block], {})[owner] = priority, end
        self.check()

    # If costs depend on sessions, each request is a session and owns the blocks that it reached.
    @rule(owner=st.sampled_from(["a", "b", ""]), step=STEPS)
    @precondition(lambda self: self.shape.policy not in ("weighted", "restore"))
    def release_owner(self, owner, step):
        """An owner is gone: blocks without another owner leave first."""
        self.now += step
        self.look()
        mine = [handle for handle, claims in self.claims.items() if owner in claims]
        for handle in mine:
            del self.claims[handle][owner]
        names = {handle: block for block, handle in self.witness.living.items()}
        free = 0
        for handle in mine:
            block = names[handle]
            leased = any(held[: len(block)] == block for held in self.pinned())
            if not leased and self.claims[handle].keys() <= {None}:
                self.claims[handle][None] = 0, None
                free += 1
        answer, blocks, left, _ = self.hint("release_owner", Release(owner=owner))
        assert (blocks, left) == (free, len(mine) - free)
        assert answer in ("accepted" if mine and not left else "clipped", "rejected")
        self.check()

    # ------------------------------------------------------------------------------ wrong calls

    @rule(pick=PICK, which=st.integers(0, 12))
    @precondition(lambda self: self.calls % 4 == 0)
    def refuse(self, pick, which):
        """A call that cannot be right raises and changes nothing."""
        lease = self.pick(pick).id if self.held else 0
        move = next(iter(self.witness.flights), 0)
        calls = [
            lambda m: m.acquire([-1], now=self.now),
            lambda m: m.acquire([2**32], now=self.now),
            lambda m: m.acquire([0], now=self.now, load="some"),
            lambda m: m.acquire([0] * 100, now=self.now),
            lambda m: m.lease(10**6),
            lambda m: m.lease(lease).commit([0] * 1000, now=self.now),
            lambda m: m.lease(lease).truncate(10**6, now=self.now),
            lambda m: m.complete([10**6], now=self.now),
            lambda m: m.complete([move], now=self.now, rank=1),
            lambda m: m.complete([move], now=self.now, layers_done=9),
            lambda m: m.lease(lease).slots(4),
            lambda m: m.explain(2**63, now=self.now),
            lambda m: m.hint([Prefetch(tokens=[1], tier=len(self.shape.rooms) - 1)], now=self.now),
        ]
        before = self.witness.snapshot()
        _, error = self.call("refuse", calls[which])
        assert isinstance(error, (ConfigError, ClosedError, NoSpaceError))
        self.unchanged(before)

    @rule()
    @precondition(lambda self: self.ended and self.calls % 4 == 1)
    def repeat(self):
        """A second report about a move changes nothing; one that contradicts is refused."""
        before, last = self.witness.snapshot(), self.ended[-1:]
        ended, _ = self.call("repeat", lambda m: m.complete(last, now=self.now))
        assert ended == 0
        self.unchanged(before)
        _, error = self.call("contradict", lambda m: m.complete(last, now=self.now, ok=False))
        assert isinstance(error, ConfigError)
        self.unchanged(before)


TestMachine = Machine.TestCase
TestMachine.pytestmark = [pytest.mark.timeout(3600)]


def teardown_module():
    """Print the mix of a deep run and hold it to its promise."""
    if os.environ.get("HYPOTHESIS_PROFILE") != "deep":
        return
    for name, times in sorted(MIX.items()):
        print(f"{times:>10}  {name}")  # noqa: T201 - the mix is what the run is for
    assert MIX["operations"] >= 10**5
