"""A storage that hangs or is slow: host and GPU hits go on, and no eviction waits for it."""

from __future__ import annotations

import queue
import threading

import pytest
import torch
from rig import SHAPE, SIZE, Shelf, Time, fetch, prompt, store

from kvtrie import BlockManager, ConfigError, Tier
from kvtrie.tiers import open_pools
from kvtrie.transfer import Executor

SECOND = 1_000_000_000
LATE = "the move ended past its deadline"


class Gated(Shelf):
    """A storage whose reads and writes wait for a signal."""

    def __init__(self):
        super().__init__()
        self.entered = threading.Semaphore(0)
        self.gates = {"read": threading.Event(), "write": threading.Event()}
        self.dropped = 0
        self.writing = self.most = 0
        self.lock = threading.Lock()
        self.open()

    def open(self):
        for gate in self.gates.values():
            gate.set()

    def _wait(self, what):
        self.entered.release()
        assert self.gates[what].wait(timeout=60)

    def read(self, key, slot, layers, memory):
        self._wait("read")
        super().read(key, slot, layers, memory)

    def write(self, key, slot, layers, memory, label):
        with self.lock:
            self.writing += 1
            self.most = max(self.most, self.writing)
        self._wait("write")
        super().write(key, slot, layers, memory, label)
        with self.lock:
            self.writing -= 1

    def count_dropped(self, blocks):
        self.dropped += blocks


class Slow(Gated):
    """A storage that ends one write at a time, when it is told to."""

    def __init__(self):
        super().__init__()
        self.permits = threading.Semaphore(0)

    def open(self):
        super().open()
        if hasattr(self, "permits"):
            self.permits.release(1000)

    def write(self, key, slot, layers, memory, label):
        assert self.permits.acquire(timeout=60)
        super().write(key, slot, layers, memory, label)

    def let_one_write_end(self, ends):
        """Let one write end, and wait for its report."""
        written = len(self.units)
        while not ends.empty():
            ends.get()
        self.permits.release()
        while len(self.units) == written:
            ends.get(timeout=30)


def world(storage, *, gpu=4, host=4, write="through", clock=None, progress=None, **settings):
    """An executor over a storage as the remote tier, whose threads are `workers`."""
    tiers = [
        Tier("gpu", blocks=gpu, write="through"),
        Tier("host", blocks=host, write=write, free_low=settings.pop("free_low", 0.0)),
        Tier("remote", blocks=100, **settings),
    ]
    manager = BlockManager(SHAPE, tiers, block_tokens=SIZE, policy="lru")
    pools = [*open_pools(SHAPE, tiers, SIZE)[:2], storage]
    return Executor(
        manager, pools, workers=1, deadline_s=2.0, clock=clock or Time(), progress=progress
    )


def wait_for_gpu_copies(executor):
    """Wait for copies between GPU and host, and for nothing else."""
    ledger, schedule = executor.runner.ledger, executor.runner.ledger.schedule
    ledger.until(
        lambda: all(job.storage is not None for job in [*schedule.queue, *schedule.running]),
        "copies are left",
    )


def only_remote(executor, tokens, seed):
    """Store a prompt, and fill GPU and host with another, which stays there."""
    kept = store(executor, tokens, seed)
    executor.drain()
    others = prompt(seed + 100, 4)
    kept_elsewhere = store(executor, others, seed + 100)
    executor.drain()
    match = executor.manager.lookup(tokens, now=executor.clock(), keep=0)
    assert [match.resident(tier) for tier in ("gpu", "host", "remote")] == [0, 0, len(tokens) // 4]
    return kept, others, kept_elsewhere


def test_host_hits_go_on_while_every_thread_of_a_storage_hangs():
    storage, ends = Gated(), queue.SimpleQueue()
    with world(storage, gpu=8, host=24, workers=2, progress=ends.put) as executor:
        manager, clock = executor.manager, executor.clock
        tokens = prompt(1, 3)
        kept = store(executor, tokens, 1)
        executor.drain()
        store(executor, prompt(2, 8), 2)
        executor.drain()
        kept_elsewhere = store(executor, prompt(3, 4), 3)
        executor.drain()
        store(executor, prompt(4, 8), 4)
        executor.drain()
        manager.mark(tokens, "host", present=False, now=clock())
        storage.gates["read"].clear()
        while storage.entered.acquire(blocking=False):
            pass
        lost = manager.acquire(tokens, now=clock(), keep=0, load="all")
        executor.poll()
        assert storage.entered.acquire(timeout=30)
        assert storage.entered.acquire(timeout=30)
        # Both threads of the storage hang, before and after the deadline.
        for _ in range(2):
            assert torch.equal(fetch(executor, prompt(3, 4)), kept_elsewhere)
            clock.now += 2 * SECOND
            executor.poll()
        executor.wait(lost)
        assert lost.matched == 0
        lost.release()
        storage.open()
        for _ in range(2):
            while ends.get(timeout=30).error != LATE:
                pass
        executor.drain()
        manager.audit()
        manager.mark(tokens, "remote", present=True, now=clock())
        assert torch.equal(fetch(executor, tokens), kept)


@pytest.mark.parametrize("write", ["back", "through"])
@pytest.mark.parametrize("workers", [1, 3])
def test_a_store_slower_than_eviction_delays_no_request_and_gains_blocks(write, workers):
    storage, ends, kept = Slow(), queue.SimpleQueue(), {}
    with world(
        storage, write=write, host=12, workers=workers, progress=ends.put, write_limit=1 << 30
    ) as executor:
        for seed in range(30):
            # A request that waited for a write would never end: the clock stands still.
            kept[seed] = store(executor, prompt(seed, 2), seed)
            wait_for_gpu_copies(executor)
            executor.manager.audit()
            busy = executor.runner.ledger.schedule.writing(2)
            assert busy <= workers * SHAPE.layers * SHAPE.layer_bytes(SIZE)
            if seed % 5 == 4:
                storage.let_one_write_end(ends)
        gained, dropped = len(storage.units) // SHAPE.layers, storage.dropped
        assert gained == 6
        assert dropped >= 2 * 30 - 12 - 4 - gained - workers
        assert executor.manager.stats().tiers["remote"].stores_dropped == dropped
        storage.open()
        executor.drain()
        assert len(storage.units) // SHAPE.layers > gained + workers
        # Each write has read what its block held: no slot that it read had another holder.
        compared = 0
        for seed, written in kept.items():
            tokens = prompt(seed, 2)
            match = executor.manager.lookup(tokens, now=executor.clock(), keep=0)
            tokens = tokens[: match.resident("remote") * SIZE]
            executor.manager.mark(tokens, "host", present=False, now=executor.clock())
            if len(tokens):
                assert torch.equal(fetch(executor, tokens), written[:, :, : len(tokens)])
                compared += len(tokens) // SIZE
        assert compared >= gained


def test_blocks_are_written_ahead_while_requests_run():
    storage = Gated()
    with world(storage, write="back", free_low=0.5, host=8) as executor:
        for seed in range(8):
            store(executor, prompt(seed, 2), seed)
            executor.drain()
        assert len(storage.units) >= 10 * SHAPE.layers


def test_writes_in_flight_are_bounded_by_bytes():
    block = SHAPE.layers * SHAPE.layer_bytes(SIZE)
    storage = Gated()
    with world(storage, workers=8, write_limit=3 * block, gpu=8, host=8) as executor:
        storage.gates["write"].clear()
        store(executor, prompt(1, 8), 1)
        executor.poll()
        for _ in range(3):
            assert storage.entered.acquire(timeout=30)
        storage.open()
        executor.drain()
        assert storage.most == 3
        assert len(storage.units) == 8 * SHAPE.layers
    with pytest.raises(ConfigError, match=f"write_limit is {block - 1} bytes, at least one block"):
        world(Gated(), write_limit=block - 1)


class Timed(Shelf):
    """A storage of several blocks a call, with one deadline for all of them."""

    def __init__(self):
        super().__init__()
        self.deadlines = []

    def read_many(self, blocks, *, deadline=None):
        self.deadlines.append(deadline)
        for block in blocks:
            self.read(*block)
        return [None] * len(blocks)

    def write_many(self, blocks, *, deadline=None):
        self.deadlines.append(deadline)
        for block in blocks:
            self.write(*block)
        return [None] * len(blocks)


class Untimed(Timed):
    """One without that parameter."""

    def read_many(self, blocks):
        return super().read_many(blocks)

    def write_many(self, blocks):
        return super().write_many(blocks)


@pytest.mark.parametrize("kind", [Timed, Untimed])
@pytest.mark.parametrize("blocks", [1, 3])
def test_a_storage_that_takes_a_deadline_gets_one_for_each_call(kind, blocks, monkeypatch):
    storage = kind()
    monkeypatch.setattr("time.monotonic_ns", lambda: 70 * SECOND)
    with world(storage) as executor:
        tokens = prompt(1, blocks)
        kept, *_ = only_remote(executor, tokens, 1)
        assert torch.equal(fetch(executor, tokens), kept)
    assert set(storage.deadlines) <= {72 * SECOND if kind is Timed else None}
    assert storage.deadlines or kind is Untimed


def test_threads_of_a_storage_are_its_own():
    with world(Gated(), workers=3) as executor:
        names = sorted(thread.name for thread in executor.runner.threads)
        assert names == ["kvtrie-tier2-0", "kvtrie-tier2-1", "kvtrie-tier2-2", "kvtrie-transfer-0"]
