"""Flush, save, restore: what a lasting tier kept is found again by a later manager."""

import numpy as np
import pytest
import torch
from rig import SHAPE, SIZE, Gate, Shelf, Time, fetch, prompt, store

from kvtrie import BlockManager, Index, Tier
from kvtrie.tiers import PersistentStorage, open_pools
from kvtrie.transfer import Executor

SECOND = 1_000_000_000


class Kept(Shelf):
    """A shelf that outlives its manager: beside the bytes it keeps rows."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def keep(self, index):
        self.rows = list(index)

    def recall(self):
        return Index(self.rows)


def begin(shelf, now=SECOND, disk=24, **settings):
    """A new process: an empty manager and empty pools over what the shelf kept."""
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
    assert isinstance(Kept(), PersistentStorage)
    assert not isinstance(Shelf(), PersistentStorage)


@pytest.mark.parametrize("workers", [0, 2])
def test_whole_prefixes_are_found_again_bit_for_bit_with_their_ages(workers):
    shelf = Kept()
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
    shelf = Kept()
    with begin(shelf, now=100 * SECOND) as executor:
        store(executor, prompt(1, 2), 1)
        executor.clock.now += 5 * SECOND
        store(executor, prompt(2, 2), 2)
        executor.save()
    with begin(shelf, now=1 * SECOND) as executor:
        executor.restore()
        old, young = (idle(executor, prompt(seed, 2))[0] for seed in (1, 2))
        assert old > young


def test_what_is_used_again_is_kept_with_its_new_age():
    shelf, first = Kept(), prompt(1, 3)
    with begin(shelf) as executor:
        kept = store(executor, first, 1)
        executor.clock.now += 5 * SECOND
        executor.save()
    with begin(shelf) as executor:
        executor.restore()
        executor.clock.now += 7 * SECOND
        assert torch.equal(fetch(executor, first), kept)
        executor.clock.now += SECOND
        executor.save()
    with begin(shelf) as executor:
        assert executor.restore() == 3
        assert {age // SECOND for age in idle(executor, first)} == {1}


def test_a_shelf_with_little_room_keeps_the_youngest_and_only_whole_prefixes():
    shelf = Kept()
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
    shelf = Kept()
    with begin(shelf, workers=1, deadline_s=2.0) as executor:
        manager, clock = executor.manager, executor.clock
        host = Gate(SHAPE, 8, SIZE)
        executor.runner.pools = (executor.pools[0], host, shelf)
        store(executor, prompt(1, 3), 1)
        manager.flush(now=clock())
        executor.poll()
        assert host.entered.acquire(timeout=30)
        clock.now += 2 * SECOND
        executor.save()
        assert shelf.rows == []
        host.open()
