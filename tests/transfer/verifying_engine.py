"""An engine without a model that believes no device: it knows every byte it should read.

The KV of a token at a layer is a pure function of the tokens up to it, so every byte that a plan
calls reused can be compared with what it must be. A request is what a real engine does: acquire,
wait, compute what is missing, commit, decode, release. It takes the addresses of its slots as soon
as it has a lease and writes there, also when others have made room amid its pass.
Invariant: whatever fails, every request ends, nothing wrong is read and every invariant of the
manager holds. Cost: a few milliseconds per request.
"""

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from faulty import (
    PATIENCE_S,
    SHAPE,
    SIZE,
    Faults,
    FaultyDisk,
    FaultyKept,
    FaultyPool,
    FaultyShelf,
)
from rig import Time

from kvtrie import BlockManager, Cost, NoSpaceError, Tier
from kvtrie.errors import TransferError
from kvtrie.transfer import Executor

# A block takes a little longer to compute than to load from disk: plans do both.
COST = Cost(ns_per_token=50_000)
CHATS = 16
TRIES = 20


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


@dataclass(frozen=True, slots=True)
class World:
    """The settings of an engine that vary."""

    structure: str = "leaf-only"
    layer_slots: tuple[bool, bool] = (False, False)
    rooms: tuple[int, int, int] = (12, 10, 40)
    write: str = "back"
    free_low: float = 0.0
    load: str = "all"
    workers: int = 1
    step: int = 1

    @property
    def most(self):
        """Tokens of a sequence such that two of them fit together."""
        return self.rooms[0] // 2 * SIZE


WORLDS = tuple(
    World(structure, slots, write=write, free_low=free_low, load=load, workers=workers)
    for structure, slots, write, free_low, load, workers in (
        ("leaf-only", (False, False), "back", 0.0, "all", 1),
        ("holes", (False, False), "back", 0.0, "all", 2),
        ("leaf-only", (True, False), "through", 0.0, "all", 2),
        ("leaf-only", (True, False), "back", 0.25, "plan", 1),
        ("leaf-only", (True, True), "back", 0.0, "all", 1),
        ("holes", (True, True), "through", 0.25, "plan", 2),
        ("holes", (True, True), "back", 0.0, "all", 1),
        ("leaf-only", (False, False), "through", 0.25, "plan", 0),
        ("holes", (True, False), "through", 0.0, "all", 0),
    )
)


@dataclass(frozen=True, slots=True)
class Request:
    """A request: the front of a conversation, new tokens, and how many tokens to answer.

    Attributes:
        chat: which conversation; the answered request is what it says from then on.
        cut: how much of it is kept, in sixteenths.
        fresh: new tokens.
        answer: tokens to generate.
    """

    chat: int
    cut: int
    fresh: int
    answer: int

    @classmethod
    def batch(cls, draw):
        """One or two random requests."""
        return [
            cls(
                draw.randrange(CHATS),
                draw.randrange(8, 17),
                draw.randrange(1, 7),
                draw.randrange(4),
            )
            for _ in range(draw.choice((1, 1, 2)))
        ]


@dataclass(slots=True)
class Results:
    """Results of a number of requests."""

    requests: int = 0
    reused: int = 0
    computed: int = 0
    restored: int = 0
    wrong: list[str] = field(default_factory=list)


class Engine:
    """Serves requests in small batches and checks every byte that it did not compute itself.

    Args:
        world: its settings.
        plan: the faults.
        folder: of the files of its disk tier; None for a storage in memory.
        keep: the file that is its host tier's memory, whose slots then hold whole blocks; None for
            memory of its own.
    """

    def __init__(self, world, plan, folder=None, keep=None):
        if keep is not None:
            world = replace(world, layer_slots=(world.layer_slots[0], False))
        gpu, host, disk = world.rooms
        one, two = world.layer_slots
        kinds = [
            Tier("gpu", gpu, layer_slots=one, write=world.write, free_low=world.free_low),
            Tier("host", host, layer_slots=two, write=world.write, keep=keep and str(keep)),
            Tier("disk", disk),
        ]
        self.world = world
        self.clock = Time()
        self.faults = Faults(plan, self.clock)
        self.shelf = FaultyShelf(self.faults)
        if folder is not None:
            self.shelf = FaultyDisk(self.faults, folder, disk)
        self.manager = BlockManager(
            SHAPE, kinds, block_tokens=SIZE, structure=world.structure, cost=COST
        )
        pools = [
            FaultyPool(self.faults, SHAPE, room, SIZE, layer_slots=slots)
            for room, slots in zip(world.rooms, world.layer_slots, strict=False)
        ]
        self.keep = keep
        if keep is not None:
            pools[1] = FaultyKept.open(self.faults, keep, host, self.clock)
        self.host = pools[1]
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
        # Four at a time begin alike; all of them together need more than all tiers hold.
        self.chats = [list(range(root, root + 2 * SIZE)) for root in (10, 30, 50, 70)] * 4
        self.serial = 100
        self.results = Results()
        self.slots = {}  # by lease: tokens, holes and slots after its last call

    def close(self):
        """End the executor, whatever hangs; no slot may be lost by then."""
        self.drain_without_faults()
        prompt = range(10**6, 10**6 + self.world.rooms[0] * SIZE)
        self.at_last(prompt, 0).release(now=self.clock())
        self.drain_without_faults()
        self.abandon()

    def abandon(self):
        """End the executor and the devices as they are."""
        self.faults.release()
        self.executor.close()
        if isinstance(self.shelf, FaultyDisk):
            self.shelf.close()
        if self.keep is not None:
            self.host.close()

    def successor(self):
        """End, and return an engine that goes on with the blocks of the kept host memory."""
        self.drain_without_faults()
        self.executor.flush()
        self.abandon()
        made = Engine(self.world, self.faults.plan, keep=self.keep)
        made.clock.now = self.clock.now
        made.faults.injected = self.faults.injected
        made.results, made.chats, made.serial = self.results, self.chats, self.serial
        made.results.wrong += self.shelf.wrong
        made.results.restored += made.executor.restore()
        made.host.flip()
        return made

    def drain_without_faults(self):
        """Release hung operations, inject no more faults, and wait until no move is left."""
        executor = self.executor
        self.faults.quiet = True
        self.faults.release()  # and nothing can begin to hang any more
        executor.drain()
        while executor.poll():  # late moves that were just released
            ledger = executor.runner.ledger
            with ledger.section:
                ticket = ledger.section.ticket(PATIENCE_S) if ledger.schedule.late() else None
            assert ticket is None or ticket.wait(), "it hangs after its release"
            executor.drain()
        self.faults.quiet = False
        moves = self.manager.stats().moves
        assert not moves, f"{moves} moves are left that nobody carries out"

    def serve(self, batch):
        """Serve some requests together; the invariants hold after each."""
        leased = []
        for request in batch:
            prompt = self.prompt(request)
            lease = self.acquire(prompt, request.answer)
            if lease is None:
                self.finish(leased)
                lease = self.retried(prompt, request.answer)
            leased.append((lease, prompt, request))
        self.finish(leased)

    def prompt(self, request):
        chat = self.chats[request.chat]
        front = chat[: len(chat) * request.cut // 16][
            : self.world.most - request.fresh - request.answer
        ]
        self.serial += request.fresh
        return [*front, *range(self.serial - request.fresh, self.serial)]

    def acquire(self, prompt, answer):
        """A lease on a prompt with room for its answer; None if there is no room now."""
        self.clock.now += 1000
        try:
            lease = self.manager.acquire(
                prompt, now=self.clock(), reserve=answer, load=self.world.load
            )
        except NoSpaceError:
            return None
        self.note_slots(lease)
        return lease

    def retried(self, prompt, answer):
        """As `acquire`, while nothing is leased: only moves that have not ended may refuse it."""
        lease = self.acquire(prompt, answer)
        if lease is None:
            self.drain_without_faults()
            lease = self.acquire(prompt, answer)
        assert lease is not None, "no room though nothing is leased and nothing moves"
        return lease

    def at_last(self, prompt, answer):
        """A lease that has all it needs, while nothing else is leased."""
        for _ in range(TRIES):
            lease = self.retried(prompt, answer)
            if self.ready(lease, len(prompt) + answer):
                return lease
            self.drain_without_faults()
        raise AssertionError(f"a request is not ready after {TRIES} tries")

    def finish(self, leased):
        """Carry leases to their end, in turn."""
        while leased:
            lease, prompt, request = leased.pop(0)
            if not self.ready(lease, len(prompt) + request.answer):
                self.finish(leased)
                lease = self.at_last(prompt, request.answer)
            self.compute(lease, prompt)
            self.chats[request.chat] = self.decode(lease, prompt, request.answer)
            lease.release(now=self.clock())
            self.executor.poll()
            self.manager.audit()
            self.manager.failed()
            self.results.requests += 1

    def ready(self, lease, tokens):
        """Wait until a lease has all it awaits and room for its tokens, which failures may take.

        Returns whether it has; else releases the lease.
        """
        try:
            self.executor.wait(lease)
            self.check_slots(lease)
            while lease.room < tokens - lease.tokens:
                lease.reserve(tokens - lease.tokens, now=self.clock())
                self.note_slots(lease)
                self.executor.wait(lease)
                self.check_slots(lease)
        except (NoSpaceError, TransferError):
            lease.release(now=self.clock())
            return False
        return True

    def compute(self, lease, prompt):
        """Check what is reused, compute the rest of a prompt, commit it."""
        expected, matched = kv(prompt), lease.matched
        missing = [lease.plan.recompute(layer) for layer in range(SHAPE.layers)]
        holes = lease.plan.recompute()
        self.check(lease, expected, matched, missing)
        rest = np.arange(matched, len(prompt))
        self.write(lease, [np.concatenate([positions, rest]) for positions in missing], expected)
        self.results.reused += matched - len(holes)
        self.results.computed += len(holes) + len(rest)
        self.check_slots(lease)
        lease.commit(prompt[matched:], now=self.clock())
        self.note_slots(lease)
        self.executor.poll()

    def decode(self, lease, prompt, answer):
        """Append the answer token by token; at the end all KV of the lease must be right.

        Returns the prompt with its answer.
        """
        sequence = list(prompt)
        for _ in range(answer):
            sequence.append(1 + hash(tuple(sequence)) % 50)
            last = np.array([len(sequence) - 1])
            self.write(lease, [last] * SHAPE.layers, kv(sequence))
            self.check_slots(lease)
            lease.commit(sequence[-1:], now=self.clock())
            self.note_slots(lease)
        none = [np.array([], dtype=np.int64)] * SHAPE.layers
        self.check(lease, kv(sequence), len(sequence), none)
        return sequence

    def rows(self, lease, positions):
        """The units and offsets of some tokens of a lease, of which each layer has its own."""
        table = self.pool.table(lease.slots(0)).numpy()
        units = [row[at // SIZE] for row, at in zip(table, positions, strict=True)]
        offsets = [at % SIZE for at in positions]
        return torch.from_numpy(np.concatenate(units)), torch.from_numpy(np.concatenate(offsets))

    def write(self, lease, positions, expected):
        """Write tokens, of which each layer has its own; amid them another request makes room."""
        kv = torch.cat([layer[at] for layer, at in zip(expected, positions, strict=True)])
        if len(kv):
            (units, offsets), half = self.rows(lease, positions), len(kv) // 2
            self.pool.scatter(units[:half], offsets[:half], *kv[:half].unbind(1))
            self.make_room()
            self.pool.scatter(units[half:], offsets[half:], *kv[half:].unbind(1))

    def make_room(self):
        """Another request of one block takes a slot, and gives it up again."""
        self.serial += SIZE
        prompt = range(self.serial - SIZE, self.serial)
        lease = self.acquire(prompt, 0)
        if lease is not None and self.ready(lease, SIZE):
            lease.release(now=self.clock())

    def note_slots(self, lease):
        """After a call of a lease: its slots stay what they are until the next one."""
        self.slots[lease.id] = lease.tokens, lease.plan.recompute() // SIZE, lease.slots(0)

    def check_slots(self, lease):
        """Compare the slots of a lease, but for those of blocks whose loads have failed."""
        tokens, holes, before = self.slots[lease.id]
        now = lease.slots(0)
        if lease.tokens < tokens:
            before = before[..., : lease.tokens // SIZE]
        same = np.zeros(before.shape[-1], dtype=bool)
        pairs = before == now[..., : len(same)] if now.shape[-1] >= len(same) else same
        same |= pairs if pairs.ndim == 1 else pairs.all(0)
        lost = np.setdiff1d(lease.plan.recompute() // SIZE, holes)
        same[lost[lost < len(same)].astype(np.int64)] = True
        if not same.all():
            self.results.wrong.append(f"lease {lease.id} had slots {before}, has {now}")

    def check(self, lease, expected, tokens, missing):
        """Compare the first tokens, but for those that are missing, bit for bit."""
        every = [np.arange(tokens)] * SHAPE.layers
        found = torch.stack(self.pool.gather(*self.rows(lease, every)), dim=1)
        wanted = expected[:, :tokens]
        same = (found.view(wanted.shape) == wanted).flatten(2).all(2).numpy()
        for layer, positions in enumerate(missing):
            same[layer, positions[positions < tokens]] = True
        for layer, position in zip(*np.nonzero(~same), strict=True):
            what = f"lease {lease.id}, block {position // SIZE}, layer {layer}"
            if what not in self.results.wrong:
                self.results.wrong.append(what)

    @property
    def wrong(self):
        """All that was not as it must be."""
        return self.results.wrong + self.shelf.wrong
