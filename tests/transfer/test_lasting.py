"""Flush, save, restore: what a lasting tier stored is found again by a later manager."""

import shutil
import threading
import time

import numpy as np
import pytest
import torch
from rig import SHAPE, SIZE, Gate, Shelf, Time, fetch, prompt, store

from kvtrie import BlockManager, Index, Tier
from kvtrie.tiers import DiskStorage, NotesUses, PersistentStorage, open_pools
from kvtrie.transfer import Executor

SECOND = 1_000_000_000


class PersistentShelf(Shelf):
    """A shelf that outlives its manager: it keeps rows in addition to the bytes."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def keep(self, index):
        self.rows = list(index)

    def recall(self):
        return Index(self.rows)


def begin(shelf, now=SECOND, disk=24, **settings):
    """A new process: an empty manager and empty pools over what the shelf stored."""
    tiers = [
        Tier("gpu", blocks=4),
        Tier("host", blocks=8),
        Tier("disk", blocks=disk),
    ]
    manager = BlockManager(SHAPE, tiers, block_tokens=SIZE)
    gpu, host, _ = open_pools(SHAPE, tiers, SIZE)
    clock = Time()
    clock.now = now
    return Executor(manager, [gpu, host, shelf], clock=clock, **settings)


def idle(executor, tokens):
    """Nanoseconds since the last use of each block of a prompt, on the disk."""
    manager, now = executor.manager, executor.clock()
    blocks = manager.lookup(tokens, now=now, keep=0).blocks
    return [manager.explain(block, now=now, tier="disk").idle for block in blocks]


def test_a_shelf_that_keeps_rows_is_lasting():
    assert isinstance(PersistentShelf(), PersistentStorage)
    assert not isinstance(Shelf(), PersistentStorage)


@pytest.mark.parametrize("workers", [0, 2])
def test_whole_prefixes_are_found_again_bit_for_bit_with_their_ages(workers):
    shelf = PersistentShelf()
    prompts = [prompt(seed, 3) for seed in range(6)]
    prompts.append(np.concatenate([prompts[0][:8], prompt(99, 1)]))  # shares two blocks
    with begin(shelf, workers=workers) as executor:
        written = []
        for seed, tokens in enumerate(prompts[:6]):
            written.append(store(executor, tokens, seed))
            executor.clock.now += SECOND
        executor.save()
        ages = [idle(executor, tokens) for tokens in prompts[:6]]
        executor.manager.audit()
    assert [age // SECOND for age, *_ in ages] == [6, 5, 4, 3, 2, 1]
    assert len(shelf.rows) == 18

    # The second process's clock has nothing to do with the first one's.
    with begin(shelf, now=1000 * SECOND, workers=workers) as executor:
        assert executor.restore() == 18
        executor.manager.audit()
        for tokens, before in zip(prompts[:6], ages, strict=True):
            assert idle(executor, tokens) == before
        now = executor.clock()
        assert executor.manager.lookup(prompts[6], now=now, keep=0).tokens == 8
        for tokens, kv in zip(prompts, written, strict=False):
            assert torch.equal(fetch(executor, tokens), kv)
            executor.drain()
        executor.manager.audit()


def test_a_clock_that_starts_anew_makes_nobody_younger():
    shelf = PersistentShelf()
    with begin(shelf, now=100 * SECOND) as executor:
        store(executor, prompt(1, 2), 1)
        executor.clock.now += 5 * SECOND
        store(executor, prompt(2, 2), 2)
        executor.save()
    with begin(shelf, now=1 * SECOND) as executor:
        executor.restore()
        old, young = (idle(executor, prompt(seed, 2))[0] for seed in (1, 2))
        assert old > young


def test_a_block_used_again_is_restored_with_its_new_age():
    shelf, first = PersistentShelf(), prompt(1, 3)
    with begin(shelf) as executor:
        stored = store(executor, first, 1)
        executor.clock.now += 5 * SECOND
        executor.save()
    with begin(shelf) as executor:
        executor.restore()
        executor.clock.now += 7 * SECOND
        assert torch.equal(fetch(executor, first), stored)
        executor.clock.now += SECOND
        executor.save()
    with begin(shelf) as executor:
        assert executor.restore() == 3
        assert {age // SECOND for age in idle(executor, first)} == {1}


def test_a_shelf_with_little_room_keeps_the_youngest_and_only_whole_prefixes():
    shelf = PersistentShelf()
    prompts = [prompt(seed, 3) for seed in range(4)]
    with begin(shelf, disk=8) as executor:
        written = []
        for seed, tokens in enumerate(prompts):
            written.append(store(executor, tokens, seed))
            executor.clock.now += SECOND
        executor.save()
    with begin(shelf, disk=8) as executor:
        assert executor.restore() == len(shelf.rows) == 8
        now = executor.clock()
        found = [executor.manager.lookup(tokens, now=now, keep=0).tokens for tokens in prompts]
        assert found[3] == 12
        assert sum(found) == 8 * SIZE
        for tokens, kv, length in zip(prompts, written, found, strict=True):
            if length:
                assert torch.equal(fetch(executor, tokens[:length]), kv[:, :, :length])
            executor.drain()


def test_saving_does_not_wait_for_a_store_that_hangs():
    shelf = PersistentShelf()
    with begin(shelf, workers=1, deadline_s=2.0) as executor:
        manager, clock = executor.manager, executor.clock
        host = Gate(SHAPE, 8, SIZE)
        executor.runner.ledger.pools = (executor.pools[0], host, shelf)
        store(executor, prompt(1, 3), 1)
        manager.flush(now=clock())
        executor.poll()
        assert host.entered.acquire(timeout=30)
        clock.now += 2 * SECOND
        executor.save()
        assert shelf.rows == []
        host.open()


class Noting(PersistentShelf):
    """One that also takes uses, when it is let; some calls of it fail."""

    def __init__(self):
        super().__init__()
        self.noted, self.go, self.fails = [], threading.Semaphore(0), False

    def note_uses(self, index):
        self.go.acquire()
        if self.fails:
            raise OSError("injected")
        self.noted.append((sorted(index.slot.tolist()), set(index.age.tolist())))


def handles(executor, *prompts):
    found = [executor.manager.lookup(one, now=executor.clock(), keep=0) for one in prompts]
    return np.concatenate([match.handles for match in found])


def executor_with_stored(shelf, seeds, **settings):
    """An executor whose disk holds these prompts, and their blocks."""
    executor = begin(shelf, **settings)
    prompts = [prompt(seed, 2) for seed in range(seeds)]
    for seed, tokens in enumerate(prompts):
        store(executor, tokens, seed)
    executor.save()
    return executor, [handles(executor, tokens) for tokens in prompts]


def over(executor):
    """The write that runs has ended."""
    assert executor._notes[2].wait(60 * SECOND)


def test_used_blocks_are_written_every_five_seconds_and_at_the_end():
    shelf = Noting()
    assert isinstance(shelf, NotesUses)
    assert not isinstance(PersistentShelf(), NotesUses)
    executor, blocks = executor_with_stored(shelf, 4, workers=0)
    slots = [sorted(executor.manager.index("disk", now=0, blocks=b).slot.tolist()) for b in blocks]
    assert all(len(both) == 2 for both in slots)
    executor.used(blocks[0])  # at once: the first report
    shelf.go.release()
    over(executor)
    executor.used(blocks[1])
    executor.clock.now += 5 * SECOND - 1
    executor.used(blocks[2])
    assert len(shelf.noted) == 1
    executor.clock.now += 1
    executor.used(blocks[1])
    executor.used(blocks[3])  # while the device is busy
    executor.clock.now += 60 * SECOND
    executor.used(blocks[3])
    shelf.go.release(9)
    executor.close()
    assert [uses for uses, _ in shelf.noted] == [slots[0], sorted(slots[1] + slots[2]), slots[3]]
    executor.used(blocks[0])
    executor.close()
    assert len(shelf.noted) == 3


def test_a_tier_that_cannot_take_uses_fails_and_delays_nobody(caplog):
    shelf = Noting()
    executor, blocks = executor_with_stored(shelf, 2, workers=0)
    shelf.fails = True
    shelf.go.release()
    executor.used(blocks[0])
    over(executor)
    assert "uses of 2 blocks were not written down: injected" in caplog.text
    executor.close()
    hanging = Noting()
    executor, blocks = executor_with_stored(hanging, 2, workers=0, deadline_s=0.01)
    executor.clock.now += 60 * SECOND
    executor.used(blocks[0])
    executor.used(blocks[1])
    executor.clock = time.monotonic_ns
    executor._notes[2]._clock = time.monotonic_ns
    executor._notes[2].started_ns = time.monotonic_ns()
    executor.close()
    assert hanging.noted == []
    hanging.go.release()


def test_uses_outlive_a_process_that_does_not_close(tmp_path):
    wall = Time()
    wall.now = 10**6 * SECOND

    def opened(folder):
        tiers = [Tier("gpu", blocks=16), Tier("disk", blocks=32, path=str(folder))]
        manager = BlockManager(SHAPE, tiers, block_tokens=SIZE)
        (gpu,) = open_pools(SHAPE, tiers[:1], SIZE)
        disk = DiskStorage(folder, SHAPE, 32, SIZE, clock=wall)
        return Executor(manager, [gpu, disk], workers=0, clock=wall)

    def order(executor):
        ages = [executor.manager.explain(b, now=wall.now, tier="disk").idle for b in last]
        return np.argsort(ages).tolist()

    executor = opened(tmp_path / "lives")
    prompts = [prompt(seed, 2) for seed in range(4)]
    for seed, tokens in enumerate(prompts):
        wall.now += 10 * SECOND
        store(executor, tokens, seed)
    executor.save()
    for at in (2, 0, 1):
        wall.now += 10 * SECOND
        with executor.manager.acquire(prompts[at], now=wall.now, keep=0) as lease:
            blocks = lease.handles
        executor.used(blocks)
        assert executor._notes[1].wait(60 * SECOND)
    last = [int(handles(executor, tokens)[-1]) for tokens in prompts]
    assert order(executor) == [1, 0, 2, 3]
    shutil.copytree(tmp_path / "lives", tmp_path / "killed")
    again = opened(tmp_path / "killed")
    assert again.restore() == 8
    last = [int(handles(again, tokens)[-1]) for tokens in prompts]
    assert order(again) == [1, 0, 2, 3]
    for one in (executor, again):
        one.close()
        one.pools[1].close()
