"""An engine without a model over devices that fail as they are told.

The KV of a token at a layer is a pure function of the tokens up to it, so every byte that a plan
calls reused can be compared with what it must be. A request is what a real engine does: acquire,
wait, compute what is missing, commit, decode, release.
Invariant: whatever fails, every request ends, nothing wrong is read and every invariant of the
manager holds. Cost: a few milliseconds per request.
"""

from __future__ import annotations

import contextlib
import errno
import threading
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import torch
from rig import Time

from kvtrie import BlockManager, ModelShape, NoSpaceError, Tier
from kvtrie.errors import TransferError
from kvtrie.tiers import Pool
from kvtrie.transfer import Executor

SHAPE = ModelShape(layers=4, kv_heads=1, head_dim=2)
SIZE = 4
SECOND = 1_000_000_000
OPERATIONS = ("read", "write", "copy")
FAULTS = ("error", "short", "slow", "hang")
PATIENCE_S = 60


def kv(tokens):
    """K and V of a sequence, float32 `(layers, tokens, 2, heads, dim)`: a hash of each prefix."""
    mask, state, states = 2**64 - 1, 0, []
    for token in tokens:
        state = ((state ^ (int(token) + 1)) * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & mask
        state ^= state >> 29
        states.append(state)
    lanes = np.arange(SHAPE.layers * 2 * SHAPE.head_dim, dtype=np.uint64) + np.uint64(1)
    mixed = np.array(states, dtype=np.uint64)[:, None] ^ (lanes * np.uint64(0xBF58476D1CE4E5B9))
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0x94D049BB133111EB)
    bits = (mixed >> np.uint64(41)).astype(np.uint32) | np.uint32(0x3F800000)  # 1 <= x < 2
    rows = bits.view(np.float32).reshape(len(tokens), SHAPE.layers, 2, 1, SHAPE.head_dim)
    return torch.from_numpy(np.ascontiguousarray(rows.swapaxes(0, 1)))


class Faults:
    """What goes wrong, shared by the devices of one engine.

    Args:
        plan: called with the name of each operation; the fault that strikes it, or None.
        clock: what a slow or hanging operation pushes past every deadline.
    """

    def __init__(self, plan, clock):
        self.plan = plan
        self.clock = clock
        self.executor = None
        self.quiet = False
        self.injected = Counter()
        self.lock = threading.Lock()
        self.gates = []

    def strike(self, operation):
        """Let a fault happen, if it is its turn. Tells whether to break off half-way."""
        with self.lock:
            fault = None if self.quiet else self.plan(operation)
            if fault is None:
                return False
            if fault == "hang" and not self.executor._threads:
                fault = "slow"  # nobody else could let it go
            self.injected[operation, fault] += 1
            if fault in ("slow", "hang"):
                self.clock.now += 2 * self.executor._deadline_ns
                gate = threading.Event()
                self.gates += [gate] * (fault == "hang")
        if fault == "error":
            raise OSError(errno.EIO, f"{operation} failed")
        if fault == "short":
            return True
        with contextlib.suppress(TransferError):  # it may be closed by now
            self.executor.poll()  # somebody looks meanwhile, and sees that it is late
        if fault == "hang":
            assert gate.wait(PATIENCE_S)
        return False

    def release(self):
        """Let go of everything that hangs."""
        with self.lock:
            for gate in self.gates:
                gate.set()
            self.gates.clear()


class FaultyPool(Pool):
    """A pool whose copies fail, before they begin or after half of the units."""

    def __init__(self, faults, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.faults = faults

    def copy_from(self, source, source_units, units):
        if self.faults.strike("copy"):
            half = len(units) // 2
            super().copy_from(source, source_units[:half], units[:half])
            raise RuntimeError(f"broke off after {half} of {len(units)} units")
        super().copy_from(source, source_units, units)


class FaultyShelf:
    """A storage of slots in a dict, which fails, before it begins or after half of the layers.

    Attributes:
        wrong: what must not be: another block in a slot, or two calls for one slot at a time.
    """

    def __init__(self, faults):
        self.faults = faults
        self.cells = {}
        self.busy = set()
        self.wrong = []

    def write(self, key, slot, layers, memory, label):
        assert label
        with self._alone(slot):
            short = self.faults.strike("write")
            for layer, unit in self._part(layers, memory, short):
                self.cells[slot, layer] = (key, unit.clone())
            if short:
                raise OSError(errno.ENOSPC, "no space left after half of the layers")

    def read(self, key, slot, layers, memory):
        with self._alone(slot):
            short = self.faults.strike("read")
            for layer, unit in self._part(layers, memory, short):
                kept, row = self.cells.get((slot, layer), (None, None))
                if kept != key:
                    self.wrong.append(f"slot {slot}, layer {layer}: not the block asked for")
                    raise LookupError(self.wrong[-1])
                unit.copy_(row)
            if short:
                raise OSError(errno.EIO, "the file ends here")

    def _part(self, layers, memory, short):
        lo, hi = layers
        end = (lo + hi) // 2 if short else hi
        return zip(range(lo, end), memory[: end - lo], strict=True)

    @contextlib.contextmanager
    def _alone(self, slot):
        with self.faults.lock:
            if slot in self.busy:
                self.wrong.append(f"slot {slot}: two calls at a time")
            self.busy.add(slot)
        try:
            yield
        finally:
            with self.faults.lock:
                self.busy.discard(slot)


@dataclass(frozen=True, slots=True)
class World:
    """The settings of an engine that vary."""

    structure: str = "leaf-only"
    layer_slots: tuple[bool, bool] = (False, False)
    rooms: tuple[int, int, int] = (12, 5, 40)
    write: str = "back"
    free_low: float = 0.0
    load: str = "all"
    workers: int = 1
    step: int = 1

    @property
    def most(self):
        """Tokens of a sequence such that two of them fit together."""
        return self.rooms[0] // 2 * SIZE


@dataclass(frozen=True, slots=True)
class Ask:
    """A request: the front of an earlier sequence, new tokens, and how many tokens to answer.

    Attributes:
        base: which sequence, among the last ones; each answered request leaves one.
        cut: how much of it, in sixteenths.
        fresh: new tokens.
        answer: tokens to generate.
    """

    base: int
    cut: int
    fresh: int
    answer: int


@dataclass(slots=True)
class Tally:
    """What came of some requests."""

    requests: int = 0
    reused: int = 0
    computed: int = 0
    settled: int = 0
    wrong: list[str] = field(default_factory=list)


class Engine:
    """Serves requests in small batches and checks every byte that it did not compute itself."""

    def __init__(self, world, plan):
        gpu, host, disk = world.rooms
        kinds = [
            Tier("gpu", gpu, layer_slots=world.layer_slots[0], write=world.write),
            Tier("host", host, layer_slots=world.layer_slots[1], write=world.write),
            Tier("disk", disk),
        ]
        if world.free_low:
            kinds[0] = Tier("gpu", gpu, layer_slots=world.layer_slots[0], free_low=world.free_low)
        self.world = world
        self.clock = Time()
        self.faults = Faults(plan, self.clock)
        self.shelf = FaultyShelf(self.faults)
        self.manager = BlockManager(SHAPE, kinds, block_tokens=SIZE, structure=world.structure)
        pools = [
            FaultyPool(self.faults, SHAPE, room, SIZE, layer_slots=slots)
            for room, slots in zip(world.rooms, world.layer_slots, strict=False)
        ]
        self.pool = pools[0]
        self.faults.executor = self.executor = Executor(
            self.manager,
            [*pools, self.shelf],
            workers=world.workers,
            deadline_s=1.0,
            clock=self.clock,
            layers_per_report=world.step,
            moves_per_job=4,
        )
        self.past = [[], list(range(1, 11))]
        self.serial = 100
        self.tally = Tally()

    def close(self):
        """End the executor, whatever hangs."""
        self.settle()
        self.executor.close()

    def settle(self):
        """Let go of what hangs and wait until nothing moves any more; nothing fails meanwhile."""
        executor = self.executor

        def ended():
            self.faults.release()
            return not executor._late()

        self.faults.quiet = True
        with executor._changed:
            assert executor._changed.wait_for(ended, PATIENCE_S), "it hangs after its release"
        executor.drain()
        self.faults.quiet = False

    def serve(self, batch):
        """Serve some requests together; the invariants hold after each."""
        held = []
        for ask in batch:
            prompt = self.prompt(ask)
            lease = self.acquire(prompt, ask.answer)
            if lease is None:
                self.finish(held)
                lease = self.acquire(prompt, ask.answer) or self.at_last(prompt, ask.answer)
            held.append((lease, prompt, ask.answer))
        self.finish(held)

    def prompt(self, ask):
        base = self.past[-(ask.base % len(self.past)) - 1]
        front = base[: len(base) * ask.cut // 16][: self.world.most - ask.fresh - ask.answer]
        self.serial += ask.fresh
        return [*front, *range(self.serial - ask.fresh, self.serial)]

    def acquire(self, prompt, answer):
        """A lease on a prompt with room for its answer; None if there is no room now."""
        self.clock.now += 1000
        try:
            return self.manager.acquire(
                prompt, now=self.clock(), reserve=answer, load=self.world.load
            )
        except NoSpaceError:
            return None

    def at_last(self, prompt, answer):
        """As `acquire`, when slots are held by moves that hang: nothing else may refuse it."""
        self.tally.settled += 1
        self.settle()
        lease = self.acquire(prompt, answer)
        assert lease is not None, "no room though nothing is leased and nothing moves"
        return lease

    def finish(self, held):
        """Carry leases to their end, in turn."""
        while held:
            lease, prompt, answer = held.pop(0)
            self.ready(lease, len(prompt) + answer)
            self.compute(lease, prompt)
            self.decode(lease, prompt, answer)
            lease.release(now=self.clock())
            self.executor.poll()
            self.manager.audit()
            self.manager.failed()
            self.tally.requests += 1

    def ready(self, lease, tokens):
        """Wait until a lease has all it awaits and room for its tokens, which failures may take."""
        for attempt in range(100):
            self.executor.wait(lease)
            if lease.room >= tokens - lease.tokens:
                return
            try:
                lease.reserve(tokens - lease.tokens, now=self.clock())
            except NoSpaceError:
                assert attempt < 50, "room that failures took does not come back"
                self.tally.settled += 1
                self.settle()
        raise AssertionError("a lease does not come to rest")

    def compute(self, lease, prompt):
        """Check what is reused, compute the rest of a prompt, commit it."""
        expected, matched = kv(prompt), lease.matched
        missing = [lease.plan.recompute(layer) for layer in range(SHAPE.layers)]
        holes = lease.plan.recompute()
        self.check(lease, expected, matched, missing)
        rest = np.arange(matched, len(prompt))
        for layer, positions in enumerate(missing):
            self.write(lease, layer, np.concatenate([positions, rest]), expected)
        self.tally.reused += matched - len(holes)
        self.tally.computed += len(holes) + len(rest)
        lease.commit(prompt[matched:], now=self.clock())
        self.executor.poll()

    def decode(self, lease, prompt, answer):
        """Append the answer token by token; at the end all that stands there must be right."""
        sequence = list(prompt)
        for _ in range(answer):
            sequence.append(1 + hash(tuple(sequence)) % 50)
            expected = kv(sequence)
            for layer in range(SHAPE.layers):
                self.write(lease, layer, np.array([len(sequence) - 1]), expected)
            lease.commit(sequence[-1:], now=self.clock())
        none = [np.array([], dtype=np.int64)] * SHAPE.layers
        self.check(lease, kv(sequence), len(sequence), none)
        self.past.append(sequence)
        del self.past[:-16]

    def rows(self, lease, layer, positions):
        """The units and offsets of some tokens of a lease."""
        at = torch.from_numpy(positions)
        return self.pool.table(lease.slots(0))[layer][at // SIZE], at % SIZE

    def write(self, lease, layer, positions, expected):
        if len(positions):
            keys, values = expected[layer, positions].unbind(1)
            self.pool.scatter(*self.rows(lease, layer, positions), keys, values)

    def check(self, lease, expected, tokens, missing):
        """Compare the first tokens, but for those that are missing, bit for bit."""
        for layer in range(SHAPE.layers):
            positions = np.setdiff1d(np.arange(tokens), missing[layer])
            found = torch.stack(self.pool.gather(*self.rows(lease, layer, positions)), dim=1)
            same = (found == expected[layer, positions]).flatten(1).all(1).numpy()
            for block in sorted({int(at) // SIZE for at in positions[~same]}):
                self.tally.wrong.append(f"lease {lease.id}, block {block}, layer {layer}")

    @property
    def wrong(self):
        """All that was not as it must be."""
        return self.tally.wrong + self.shelf.wrong
