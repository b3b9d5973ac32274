"""The executor: moves become bytes, in the right order, and every one of them is reported."""

import threading

import numpy as np
import pytest
import torch

from kvtrie import BlockManager, ModelShape, Tier
from kvtrie.errors import ClosedError, ConfigError, TransferError
from kvtrie.tiers import Pool, open_pools
from kvtrie.transfer import Executor

SHAPE = ModelShape(layers=4, kv_heads=2, head_dim=4)
SIZE = 4
FORMS = [(False, False), (True, True), (True, False)]


class Time:
    """A clock that only moves when told."""

    def __init__(self):
        self.now = 1_000_000_000

    def __call__(self):
        return self.now


class Gate(Pool):
    """A pool whose copies into it wait for a signal, and then go through or fail."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.entered = threading.Semaphore(0)
        self.leave = threading.Semaphore(0)
        self.error = None

    def copy_from(self, source, source_units, units):
        self.entered.release()
        assert self.leave.acquire(timeout=30)
        if self.error is not None:
            raise self.error
        super().copy_from(source, source_units, units)


class Shelf:
    """A storage in a dict, as a disk would be: whole units, by key."""

    def __init__(self):
        self.kept = {}

    def write(self, key, slot, layers, memory, label):  # noqa: ARG002
        for layer, unit in zip(range(*layers), memory, strict=True):
            self.kept[bytes(key), layer] = unit.clone()

    def read(self, key, slot, layers, memory):  # noqa: ARG002
        for layer, unit in zip(range(*layers), memory, strict=True):
            unit.copy_(self.kept[bytes(key), layer])


def world(gpu=4, host=12, form=(False, False), write="back"):
    tiers = [
        Tier("gpu", blocks=gpu, layer_slots=form[0], write=write),
        Tier("host", blocks=host, layer_slots=form[1]),
    ]
    manager = BlockManager(SHAPE, tiers, block_tokens=SIZE)
    return manager, list(open_pools(SHAPE, tiers, SIZE))


def prompt(seed, blocks):
    return np.random.default_rng(seed).integers(0, 1000, blocks * SIZE)


def rows(pool, lease, tokens):
    """Units and offsets of the first tokens of a lease, per layer."""
    table = pool.table(lease.slots(0))
    at = torch.arange(tokens)
    return [(layer[at // SIZE], at % SIZE) for layer in table]


def store(executor, tokens, seed):
    """Compute, that is invent, the KV of a prompt and commit it; returns what was written."""
    generator = torch.Generator().manual_seed(seed)
    manager, pool = executor.manager, executor.pools[0]
    with manager.acquire(tokens, now=executor.clock(), keep=0) as lease:
        assert lease.matched == 0
        executor.wait(lease)
        written = []
        for where in rows(pool, lease, len(tokens)):
            kv = torch.randn(2, len(tokens), 2, 4, generator=generator)
            pool.scatter(*where, *kv)
            written.append(kv)
        lease.commit(tokens, now=executor.clock())
    return torch.stack(written)


def fetch(executor, tokens):
    """What stands in the slots of a prompt whose KV is all cached."""
    manager, pool = executor.manager, executor.pools[0]
    with manager.acquire(tokens, now=executor.clock(), keep=0, load="all") as lease:
        assert lease.matched == len(tokens)
        executor.wait(lease)
        assert len(lease.plan.recompute()) == 0
        return torch.stack([torch.stack(pool.gather(*at)) for at in rows(pool, lease, len(tokens))])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("workers", [0, 2])
def test_kv_comes_back_bit_for_bit(form, workers):
    manager, pools = world(form=form)
    with Executor(manager, pools, workers=workers) as executor:
        prompts = [prompt(seed, 3) for seed in range(3)]
        written = [store(executor, tokens, seed) for seed, tokens in enumerate(prompts)]
        for _ in range(3):
            for tokens, kv in zip(prompts, written, strict=True):
                assert torch.equal(fetch(executor, tokens), kv)
        executor.drain()
        manager.audit()
        assert manager.failed() == []
    assert threading.active_count() == 1


def test_a_disk_takes_part_through_its_storage():
    tiers = [
        Tier("gpu", blocks=4, layer_slots=True),
        Tier("host", blocks=8, layer_slots=True),
        Tier("disk", blocks=24),
    ]
    manager = BlockManager(SHAPE, tiers, block_tokens=SIZE)
    gpu, host, _ = open_pools(SHAPE, tiers, SIZE)
    shelf = Shelf()
    with Executor(manager, [gpu, host, shelf]) as executor:
        prompts = [prompt(seed, 3) for seed in range(6)]
        written = [store(executor, tokens, seed) for seed, tokens in enumerate(prompts)]
        executor.drain()
        assert shelf.kept
        for tokens, kv in zip(prompts, written, strict=True):
            assert torch.equal(fetch(executor, tokens), kv)
            executor.drain()


def test_a_move_starts_only_after_the_one_it_names():
    manager, pools = world(gpu=3)
    host = pools[1] = Gate(SHAPE, 8, SIZE)
    first, second = prompt(1, 3), prompt(2, 3)
    with Executor(manager, pools, workers=2) as executor:
        kept = store(executor, first, 1)
        lease = manager.acquire(second, now=executor.clock())  # its slots are first's
        executor.poll()
        assert host.entered.acquire(timeout=30)  # the store has begun
        assert not lease.ready()
        lease.release()
        # Loading first again needs the slots that the store still reads.
        again = manager.acquire(first, now=executor.clock(), keep=0, load="all")
        before = [plane.clone() for plane in pools[0].planes]
        executor.poll()
        assert all(map(torch.equal, before, pools[0].planes))
        host.leave.release(20)
        executor.wait(again)
        assert torch.equal(
            torch.stack([torch.stack(pools[0].gather(*at)) for at in rows(pools[0], again, 12)]),
            kept,
        )
        again.release()


def test_a_failed_store_leaves_the_block_where_it_was():
    manager, pools = world(gpu=3)
    host = pools[1] = Gate(SHAPE, 8, SIZE)
    host.error = RuntimeError("no such page")
    host.leave.release(20)
    first = prompt(1, 3)
    with Executor(manager, pools) as executor:
        kept = store(executor, first, 1)
        lease = manager.acquire(prompt(2, 1), now=executor.clock())
        executor.drain()
        failed = manager.failed()
        assert failed
        assert "RuntimeError: no such page" in failed[0].reason
        lease.release()
        executor.drain()
        match = manager.lookup(first, now=executor.clock(), keep=0)
        assert match.tokens >= 8
        assert torch.equal(fetch(executor, first[: match.tokens]), kept[:, :, : match.tokens])
        manager.audit()


def test_a_failed_load_becomes_something_to_compute():
    manager, pools = world(gpu=3)
    gpu = pools[0] = Gate(SHAPE, 3, SIZE)
    first = prompt(1, 3)
    with Executor(manager, pools) as executor:
        gpu.leave.release(20)
        store(executor, first, 1)
        store(executor, prompt(2, 3), 2)
        executor.drain()
        gpu.error = OSError("read error")
        lease = manager.acquire(first, now=executor.clock(), load="all")
        executor.wait(lease)
        assert lease.ready()
        reasons = {row.reason for row in manager.failed() if row.lease == lease.id}
        assert any("OSError: read error" in reason for reason in reasons)
        assert lease.matched == 0  # leaf-only: a prefix or nothing
        lease.release()
        manager.audit()


def test_a_move_past_its_deadline_fails_and_keeps_its_slots_until_it_ends():
    manager, pools = world(gpu=3)
    host = pools[1] = Gate(SHAPE, 8, SIZE)
    clock = Time()
    with Executor(manager, pools, workers=1, deadline_s=2.0, clock=clock) as executor:
        store(executor, prompt(1, 3), 1)
        lease = manager.acquire(prompt(2, 3), now=clock())
        executor.poll()
        assert host.entered.acquire(timeout=30)
        clock.now += 1_999_000_000
        executor.poll()
        assert manager.failed() == []
        clock.now += 1_000_000
        assert executor.poll() > 0  # it still runs
        assert any("no end after 2.0" in row.reason for row in manager.failed())
        manager.audit()
        host.leave.release(20)
        executor.drain()
        lease.release()
        manager.audit()


def test_progress_is_reported_layer_by_layer():
    manager, pools = world(gpu=3, write="through")
    first = prompt(1, 3)
    executor = Executor(manager, pools, workers=0, layers_per_report=1)
    store(executor, first, 1)
    executor.drain()
    store(executor, prompt(2, 3), 2)
    executor.drain()
    lease = manager.acquire(first, now=executor.clock(), keep=0, load="all")
    seen = []
    original = pools[0].copy_from

    def watched(source, source_units, units):
        match = manager.lookup(first, now=executor.clock(), keep=0)
        seen.append([block.copies[0].layer_hi for block in match.blocks])
        original(source, source_units, units)

    pools[0].copy_from = watched
    executor.wait(lease)
    assert seen == [[layer] * 3 for layer in range(SHAPE.layers)]
    lease.release()
    executor.close()


def test_closing_fails_what_has_not_started_and_waits_for_what_runs():
    manager, pools = world(gpu=3)
    host = pools[1] = Gate(SHAPE, 8, SIZE)
    executor = Executor(manager, pools, workers=1, moves_per_job=1)
    store(executor, prompt(1, 3), 1)
    lease = manager.acquire(prompt(2, 3), now=executor.clock())
    executor.poll()
    assert host.entered.acquire(timeout=30)
    closer = threading.Thread(target=executor.close)
    closer.start()
    host.leave.release(20)
    closer.join(timeout=30)
    assert not closer.is_alive()
    assert threading.active_count() == 1
    assert any("closed before" in row.reason for row in manager.failed())
    executor.close()
    with pytest.raises(TransferError, match="closed"):
        executor.poll()
    lease.release()
    manager.audit()


def test_waiting_for_moves_that_somebody_else_took_is_an_error():
    manager, pools = world(gpu=3)
    with Executor(manager, pools) as executor:
        store(executor, prompt(1, 3), 1)
        lease = manager.acquire(prompt(2, 3), now=executor.clock())
        taken = manager.moves()
        assert len(taken)
        with pytest.raises(TransferError, match=f"lease {lease.id} "):
            executor.wait(lease)
        manager.complete(taken.id, now=executor.clock(), ok=False, error="lost")
        lease.release()


def test_a_manager_that_is_gone_is_told_to_whoever_waits():
    manager, pools = world(gpu=3)
    host = pools[1] = Gate(SHAPE, 8, SIZE)
    with Executor(manager, pools, workers=1) as executor:
        store(executor, prompt(1, 3), 1)
        manager.acquire(prompt(2, 3), now=executor.clock())
        executor.poll()
        assert host.entered.acquire(timeout=30)
        manager.close()
        host.leave.release(20)
        with pytest.raises((TransferError, ClosedError)):
            executor.drain()


@pytest.mark.parametrize(
    "wrong",
    [
        {"workers": -1},
        {"deadline_s": 0.0},
        {"layers_per_report": 0},
        {"moves_per_job": 0},
    ],
)
def test_numbers_that_cannot_be_are_refused(wrong):
    manager, pools = world()
    with pytest.raises(ConfigError):
        Executor(manager, pools, **wrong)


def test_pools_match_the_tiers():
    manager, pools = world()
    for wrong in (pools[:1], [pools[0], None]):
        with pytest.raises(ConfigError, match="1 pools given for 2"):
            Executor(manager, wrong)
