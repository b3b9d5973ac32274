"""A simulation of machines with a shared store, written again in the plainest way.

Serial engines, prompts of whole blocks, prefills that wait for all loads, least-recently-used
tiers, `write = "through"` on both tiers of a machine. Sets of names, lists, and a heap of events:
nothing is shared with the simulator. A block is named by its prompt up to its end. A block that
leaves the GPU has another copy: nothing is written when it leaves.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from functools import partial

TOKENS = 16  # of a block
BYTES = 16384
NS_PER_TOKEN = 1000
WRITES = 4  # of a machine to the store at a time
ENDS, COMPUTED, ARRIVES, BEGINS = range(4)  # the order of events of one time


@dataclass
class Lane:
    bytes_per_s: int
    latency_ns: int
    free: list[int] = field(default_factory=lambda: [0])  # shared by the lanes of one queue

    def carry(self, blocks, now):
        """Return when blocks that enter now are there."""
        took = self.latency_ns - (-blocks * BYTES * 10**9 // self.bytes_per_s)
        self.free[0] = max(now, self.free[0]) + took
        return self.free[0]


@dataclass
class Store:
    room: int
    latency_ns: int
    lookup: str
    blocks: dict = field(default_factory=dict)  # block: (written at, writers), by last use
    evicted: int = 0

    def finds(self, block, machine, now):
        if block not in self.blocks:
            return False
        at, writers = self.blocks[block]
        return machine in writers or (self.lookup == "all" and at + self.latency_ns <= now)

    def use(self, block):
        self.blocks[block] = self.blocks.pop(block)

    def put(self, block, machine, now):
        at, writers = self.blocks.pop(block, (now, set()))
        self.blocks[block] = at, writers | {machine}
        while len(self.blocks) > self.room:
            del self.blocks[next(iter(self.blocks))]
            self.evicted += 1


@dataclass
class Machine:
    number: int
    gpu_room: int
    host_room: int
    host_read: Lane
    host_store: Lane
    read: Lane
    store: Lane
    gpu: set = field(default_factory=set)
    host: set = field(default_factory=set)
    believed: set = field(default_factory=set)  # to be in the store
    stale: set = field(default_factory=set)  # believed, and known not to be there
    used: dict = field(default_factory=dict)
    queue: list = field(default_factory=list)
    runs: bool = False
    unwritten: list = field(default_factory=list)
    writing: int = 0

    def local(self, block):
        return block in self.gpu or block in self.host

    def make_room(self, tier, room, count, stay):
        """The least recently used blocks leave, the last ones of their prompts first."""
        old = sorted(tier - set(stay), key=lambda block: (self.used[block], -len(block)))
        while len(tier) + count > room:
            tier.remove(old.pop(0))

    def forget(self, blocks, shared, now):
        """Blocks that have left the store are believed in as long as others need them."""
        for block in blocks:
            if shared.finds(block, self.number, now):
                self.stale.discard(block)
                continue
            known = self.gpu | self.host | self.believed
            if self.local(block) or not any(other[:-1] == block for other in known):
                self.believed.discard(block)
                self.stale.discard(block)
            else:
                self.stale.add(block)

    def find(self, usable, shared, now):
        """Return the leading blocks that are here or in the store, and those only there."""
        self.forget(sorted(self.stale), shared, now)
        stored = [shared.finds(block, self.number, now) for block in usable]
        reach = leading(
            self.local(block) or remote for block, remote in zip(usable, stored, strict=True)
        )
        found = [block for block in usable[:reach] if not self.local(block)]
        for block in reversed(found):
            shared.use(block)
        self.believed.update(found)
        known = leading(self.local(block) or block in self.believed for block in usable)
        lost = [at for at in range(reach, known) if usable[at] in self.believed]
        self.forget([usable[at] for at in reversed(lost)], shared, now)
        return usable[:reach], found


def leading(flags):
    """Number of leading flags that are set."""
    count = 0
    for flag in flags:
        if not flag:
            break
        count += 1
    return count


class Simulation:
    def __init__(self, machines, store):
        self.machines, self.shared = machines, store
        self.events, self.count, self.lines = [], 0, {}

    def at(self, time, kind, machine, do):
        self.count += 1
        heapq.heappush(self.events, (time, kind, machine, self.count, do))

    def play(self, requests):
        """Requests are `(arrival in ns, prompt as names of blocks)`, to each machine in turn."""
        for number, (arrival, prompt) in enumerate(requests):
            self.at(arrival, ARRIVES, 0, partial(self.arrive, number, prompt))
        while self.events:
            now, _, _, _, do = heapq.heappop(self.events)
            do(now)
        return [self.lines[number] for number in range(len(requests))]

    def arrive(self, number, prompt, now):
        machine = self.machines[number % len(self.machines)]
        machine.queue.append((number, [tuple(prompt[: end + 1]) for end in range(len(prompt))]))
        self.at(now, BEGINS, machine.number, partial(self.begin, machine))

    def begin(self, machine, now):
        if machine.runs or not machine.queue:
            return
        machine.runs = True
        number, path = machine.queue.pop(0)
        # The last token is always computed.
        hits, found = machine.find(path[:-1], self.shared, now)
        on_gpu = [block for block in hits if block in machine.gpu]
        on_host = [block for block in hits if block in machine.host - machine.gpu]
        machine.used.update(dict.fromkeys(hits, now))
        before = set(machine.gpu)
        machine.make_room(machine.gpu, machine.gpu_room, len(path) - len(on_gpu), hits)
        if not before <= machine.gpu | machine.host | machine.believed:
            raise NotImplementedError("the only copy of a block leaves the GPU")
        # Loads from the store pass through slots of the host, and stay on the GPU.
        machine.make_room(machine.host, machine.host_room, len(found), hits)
        machine.gpu.update(hits)
        places = tuple(len(each) * TOKENS for each in (on_gpu, on_host, found))
        self.lines[number] = {"first": None, "hits": places}
        loads = [None] * (len(found) + bool(on_host))
        loaded = partial(self.loaded, machine, number, path, len(hits), loads)
        if on_host:
            self.at(machine.host_read.carry(len(on_host), now), ENDS, machine.number, loaded)
        for _ in found:
            up = partial(self.goes_up, machine, loaded)
            self.at(machine.read.carry(1, now), ENDS, machine.number, up)
        if not loads:
            self.compute(machine, number, path, len(hits), now)

    def goes_up(self, machine, loaded, now):
        self.at(machine.host_read.carry(1, now), ENDS, machine.number, loaded)

    def loaded(self, machine, number, path, hits, loads, now):
        loads.pop()
        if not loads:
            self.compute(machine, number, path, hits, now)

    def compute(self, machine, number, path, hits, now):
        end = now + (len(path) - hits) * TOKENS * NS_PER_TOKEN
        self.lines[number]["first"] = end
        self.at(end, COMPUTED, machine.number, partial(self.computed, machine, path, hits))

    def computed(self, machine, path, hits, now):
        machine.used.update(dict.fromkeys(path, now))
        machine.gpu.update(path[hits:])
        lacks = [block for block in path[hits:] if block not in machine.host | machine.believed]
        machine.make_room(machine.host, machine.host_room, len(lacks), path)
        machine.host.update(lacks)
        if lacks:
            end = machine.host_store.carry(len(lacks), now)
            self.at(end, ENDS, machine.number, partial(self.stored, machine, lacks))
        machine.runs = False
        self.at(now, BEGINS, machine.number, partial(self.begin, machine))

    def stored(self, machine, blocks, now):
        machine.unwritten += blocks
        self.write(machine, now)

    def write(self, machine, now):
        while machine.writing < WRITES and machine.unwritten:
            machine.writing += 1
            written = partial(self.written, machine, machine.unwritten.pop(0))
            self.at(machine.store.carry(1, now), ENDS, machine.number, written)

    def written(self, machine, block, now):
        machine.writing -= 1
        machine.believed.add(block)
        self.shared.put(block, machine.number, now)
        self.write(machine, now)
