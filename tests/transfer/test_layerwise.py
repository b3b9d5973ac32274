"""The layer-wise engine: how often it yields, what is there when, and what an abort leaves."""

import threading
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from rig import SHAPE, SIZE, Gate, Shelf, fetch, prompt, rows, store

from kvtrie import BlockManager, Lane, Tier
from kvtrie.errors import ConfigError, NoSpaceError, TransferError
from kvtrie.tiers import Pool, open_pools
from kvtrie.transfer import Executor, Layerwise, LayerwiseEngine, Request

LAYERS = SHAPE.layers
WORLDS = {
    "host": {},
    "layer slots": {"layer_slots": True},
    "disk": {"host": 8, "disk": 60},
    "no room in transit": {"host": 2, "disk": 60},
}


def world(*, gpu=6, host=60, disk=0, write="back", staging=0, layer_slots=False):
    tiers = [
        Tier("gpu", blocks=gpu, write=write, layer_slots=layer_slots),
        Tier("host", blocks=host, layer_slots=layer_slots),
        *([Tier("disk", blocks=disk)] if disk else []),
    ]
    manager = BlockManager(SHAPE, tiers, block_tokens=SIZE)
    pools = list(open_pools(SHAPE, tiers, SIZE, staging=staging))
    if disk:
        pools[2] = Shelf()
    return manager, pools


def layer_of(pool, lease, tokens, layer):
    return torch.stack(pool.gather(*rows(pool, lease, tokens)[layer]))


def retrieved(engine, tokens, kv):
    """Retrieve a prompt and compare each layer as soon as it is yielded; the hit count."""
    pool = engine.executor.pools[0]
    with engine.acquire(tokens, keep=0, load="all") as lease:
        hit = lease.matched
        steps_seen = []
        for step in engine.retrieve_layer(lease):
            steps_seen.append(step)
            if 1 < len(steps_seen) < LAYERS + 2:
                assert torch.equal(layer_of(pool, lease, hit, step), kv[step][:, :hit])
                if engine.settings.blending:
                    laid_out = torch.stack(engine.buffer(lease, step))
                    assert torch.equal(laid_out, kv[step][:, :hit])
        assert steps_seen == [hit, *range(LAYERS), hit]
        assert lease.ready()
    return hit


@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "settings",
    [
        Layerwise(),
        Layerwise(use_gpu=True, staging_bytes=3000),
        Layerwise(blending=True),
        Layerwise(look_ahead=0),
        Layerwise(use_layerwise=False),
    ],
    ids=["direct", "staged", "blending", "no look-ahead", "all at once"],
)
def test_a_retrieval_yields_layers_and_two_times_and_each_layer_is_there(name, workers, settings):
    manager, pools = world(**WORLDS[name])
    before = set(threading.enumerate())
    with (
        Executor(manager, pools, workers=workers) as executor,
        LayerwiseEngine(executor, settings) as engine,
    ):
        prompts = [prompt(seed, 3) for seed in range(4)]
        written = [store(executor, tokens, seed) for seed, tokens in enumerate(prompts)]
        executor.drain()
        hits = 0
        for _ in range(2):
            for tokens, kv in zip(prompts, written, strict=True):
                hits += retrieved(engine, tokens, kv)
                manager.audit()
        assert hits > 0
        assert retrieved(engine, prompt(99, 2), written[0]) == 0  # no hit
        longer = np.concatenate([prompts[0], prompt(98, 1)])
        assert retrieved(engine, longer, written[0]) in {0, 4, 8, 12}  # a partial one
        executor.drain()
        manager.audit()
        assert manager.failed() == []
    assert set(threading.enumerate()) <= before


def test_hits_on_all_tiers_come_layer_by_layer():
    manager, pools = world(gpu=4, host=6, disk=60)
    with Executor(manager, pools) as executor, LayerwiseEngine(executor) as engine:
        tokens = prompt(1, 4)
        kv = store(executor, tokens, 1)
        executor.flush()
        fillers = [prompt(seed, 2) for seed in range(2, 6)]
        for seed, other in enumerate(fillers):
            store(executor, other, seed)
            executor.drain()
        with manager.acquire(tokens[:8], now=executor.clock(), load="all", keep=0) as lease:
            executor.wait(lease)
        executor.drain()
        found = manager.lookup(tokens, now=executor.clock(), keep=0).blocks
        assert len({block.copies[0].tier for block in found}) >= 2
        assert retrieved(engine, tokens, kv) == 16


class Slow(Pool):
    """A device that records which layers' loads or stores have begun."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.begun = threading.Condition()
        self.layers_begun = set()
        self.copies = 0

    def copy_from(self, source, source_units, units):
        with self.begun:
            self.layers_begun.add(int(source_units[0]) % self.layers)
            self.copies += 1
            self.begun.notify_all()
        super().copy_from(source, source_units, units)


class Deadlock(Exception):  # noqa: N818 - what the fake device reports
    """The computation waits for a copy that nothing will start."""


def compute(device, stream, layer):
    """A layer's computation, which ends when the copy of that layer has begun.

    The stream gets a mark after all its work: if the mark comes first, nothing will start the copy
    while the computation waits.
    """
    passed = threading.Event()

    def mark():
        with device.begun:
            passed.set()
            device.begun.notify_all()

    stream.submit(mark)
    with device.begun:
        device.begun.wait_for(lambda: layer in device.layers_begun or passed.is_set())
        if layer not in device.layers_begun:
            raise Deadlock(layer)


@pytest.mark.parametrize("look_ahead", [0, 1, 2])
def test_a_layer_computes_while_the_next_one_loads(look_ahead):
    manager, pools = world()
    pools[0] = Slow(SHAPE, 6, SIZE)
    with (
        Executor(manager, pools) as executor,
        LayerwiseEngine(executor, Layerwise(look_ahead=look_ahead)) as engine,
    ):
        tokens = prompt(1, 3)
        store(executor, tokens, 1)
        store(executor, prompt(2, 6), 2)
        executor.drain()
        pools[0].layers_begun.clear()
        lease = engine.acquire(tokens, keep=0, load="all")
        assert lease.matched == 12
        steps = engine.retrieve_layer(lease)
        with closing(steps):
            next(steps)
            for layer in range(LAYERS - 1):
                assert next(steps) == layer
                if look_ahead == 0:
                    with pytest.raises(Deadlock):
                        compute(pools[0], engine.load, layer + 1)
                    break
                compute(pools[0], engine.load, layer + 1)
        lease.release()


def test_a_layer_is_stored_while_the_next_one_computes():
    manager, pools = world(write="through", staging=3)
    pools[1] = Slow(SHAPE, 60, SIZE, spare=3)
    with Executor(manager, pools) as executor, LayerwiseEngine(executor) as engine:
        tokens = prompt(1, 3)
        with engine.acquire(tokens, keep=0) as lease:
            steps = engine.store_layer(lease, tokens)
            for layer in range(LAYERS):
                if layer:
                    compute(pools[1], engine.store, layer - 1)
                next(steps)
            next(steps)
            assert next(steps, None) is None


def test_a_storing_yields_layers_and_one_times_and_its_bytes_are_adopted():
    manager, pools = world(write="through", staging=3)
    host = pools[1] = Slow(SHAPE, 60, SIZE, spare=3)
    with Executor(manager, pools) as executor, LayerwiseEngine(executor) as engine:
        tokens = prompt(1, 3)
        kv = torch.randn(LAYERS, 2, 12, 2, 4)
        with engine.acquire(tokens, keep=0) as lease:
            steps_seen = []
            steps = engine.store_layer(lease, tokens)
            for layer in range(LAYERS):
                pools[0].scatter(*rows(pools[0], lease, 12)[layer], *kv[layer])
                steps_seen.append(next(steps))
            assert len(manager.lookup(tokens, now=executor.clock(), keep=0).blocks) == 0
            steps_seen.append(next(steps))
            assert next(steps, None) is None
            assert steps_seen[:LAYERS] == list(range(LAYERS))
            assert len(steps_seen[-1].new) == 3
            executor.drain()
            assert host.copies == LAYERS  # their slots took over what had come down
        assert sorted(host.set_aside(3)) != [60, 61, 62]
        store(executor, prompt(2, 3), 2)
        executor.drain()
        store(executor, prompt(3, 6), 3)
        executor.drain()
        assert torch.equal(fetch(executor, tokens), kv)
        manager.audit()


def test_room_for_a_storing_is_all_or_nothing():
    manager, pools = world(write="through", staging=2)
    with Executor(manager, pools) as executor, LayerwiseEngine(executor) as engine:
        tokens = prompt(1, 3)
        with engine.acquire(tokens, keep=0) as lease:
            with pytest.raises(NoSpaceError, match="3 spare blocks wanted, 2 of 2 are free") as no:
                next(engine.store_layer(lease, tokens))
            assert (no.value.wanted, no.value.free) == (3, 2)
            assert len(pools[1].set_aside(2)) == 2
            lease.commit(tokens, now=executor.clock())  # as without an engine
        executor.drain()
        manager.audit()


@pytest.mark.parametrize("step", range(LAYERS + 1))
def test_an_aborted_storing_gives_its_room_back(step):
    manager, pools = world(write="through", staging=3)
    with Executor(manager, pools) as executor, LayerwiseEngine(executor) as engine:
        tokens = prompt(1, 3)
        with engine.acquire(tokens, keep=0) as lease:
            with closing(engine.store_layer(lease, tokens)) as steps:
                for _ in range(step):
                    next(steps)
            assert len(pools[1].set_aside(3)) == 3
            assert lease.tokens == 0
        manager.audit()


@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.parametrize("step", range(LAYERS + 2))
def test_an_aborted_retrieval_gives_everything_back(name, step):
    manager, pools = world(**WORLDS[name])
    with Executor(manager, pools) as executor, LayerwiseEngine(executor) as engine:
        tokens = prompt(1, 3)
        kv = store(executor, tokens, 1)
        executor.flush()
        store(executor, prompt(2, 6), 2)
        executor.drain()
        lease = engine.acquire(tokens, keep=0, load="all")
        with closing(engine.retrieve_layer(lease)) as steps:
            for _ in range(step):
                next(steps)
        lease.release()
        executor.drain()
        manager.audit()
        assert manager.stats().moves == 0
        with manager.acquire(tokens, now=executor.clock(), keep=0, load="all") as lease:
            executor.wait(lease)
            there = np.setdiff1d(np.arange(lease.matched), lease.plan.recompute())
            assert len(there) > 0
            for layer in range(LAYERS):
                found = layer_of(pools[0], lease, lease.matched, layer)
                assert torch.equal(found[:, there], kv[layer][:, there])


def test_a_layer_that_cannot_be_read_is_reported_and_its_block_is_not_served_again():
    manager, pools = world(**WORLDS["disk"])
    with Executor(manager, pools) as executor, LayerwiseEngine(executor) as engine:
        prompts = [prompt(seed, 3) for seed in range(5)]
        for seed, tokens in enumerate(prompts):
            store(executor, tokens, seed)
            executor.drain()
        executor.flush()
        on_disk = next(
            tokens
            for tokens in prompts
            if (found := manager.lookup(tokens, now=executor.clock(), keep=0)).tokens == 12
            and found.blocks[2].copies[0].tier == 2
        )
        read = pools[2].read

        def broken(key, slot, layers, memory):
            if layers[0] == 2:
                raise OSError("no such sector")
            read(key, slot, layers, memory)

        pools[2].read = broken
        lease = engine.acquire(on_disk, keep=0, load="all")
        steps = engine.retrieve_layer(lease)
        steps_seen = [next(steps)]
        with pytest.raises(TransferError, match=r"layer \d of 4 does not come: no such sector"):
            steps_seen.extend(steps)
        assert 1 <= len(steps_seen) <= 3
        assert any("no such sector" in row.reason for row in manager.failed())
        lease.release()
        executor.drain()
        manager.audit()
        assert manager.lookup(on_disk, now=executor.clock(), keep=0).tokens < 12


def test_a_batch_waits_once_per_layer_and_stream():
    manager, pools = world(gpu=12, write="through", staging=6)
    with Executor(manager, pools) as executor, LayerwiseEngine(executor) as engine:
        prompts = [prompt(seed, 2) for seed in range(3)]
        written = [store(executor, tokens, seed) for seed, tokens in enumerate(prompts)]
        executor.drain()
        store(executor, prompt(50, 12), 50)
        executor.drain()
        fresh = prompt(77, 1)
        leases = [
            engine.acquire(np.concatenate([tokens, fresh]), keep=0, load="all")
            for tokens in prompts
        ]
        batch = [Request(lease, fresh) for lease in leases]
        assert engine.start_load_kv(batch) == [8, 8, 8]
        assert len(engine.layerwise_retrievers) == 3
        with pytest.raises(ConfigError, match="a pass over 3 requests has not ended"):
            engine.start_load_kv(batch)
        recorded = engine.current.record
        points = []
        engine.current.record = lambda: points.append(1) or recorded()
        waits = engine.current.waits
        for layer in range(LAYERS):
            engine.wait_for_layer_load(layer)
            assert engine.current.waits == waits + layer + 1
            for lease, kv in zip(leases, written, strict=True):
                assert torch.equal(layer_of(pools[0], lease, 8, layer), kv[layer])
            engine.save_kv_layer(layer)
            assert len(points) == layer + 1
        committed = engine.wait_for_save()
        assert [len(one.new) for one in committed] == [1, 1, 1]
        for lease in leases:
            lease.release()
        executor.drain()
        manager.audit()
        assert len(pools[1].set_aside(6)) == 6


def test_requests_that_load_the_same_blocks_wait_for_one_copy():
    manager, pools = world(gpu=8)
    with Executor(manager, pools) as executor, LayerwiseEngine(executor) as engine:
        tokens = prompt(1, 3)
        kv = store(executor, tokens, 1)
        store(executor, prompt(2, 8), 2)
        executor.drain()
        first, second = (engine.acquire(tokens, keep=0, load="all") for _ in range(2))
        for lease in (second, first):  # the one that joined comes first
            steps_seen = list(engine.retrieve_layer(lease))
            assert steps_seen == [12, *range(LAYERS), 12]
            assert torch.equal(layer_of(pools[0], lease, 12, 3), kv[3])
        first.release()
        second.release()
        manager.audit()


def test_loads_of_a_lease_that_nobody_retrieves_are_anybodys():
    manager, pools = world()
    with Executor(manager, pools) as executor, LayerwiseEngine(executor) as engine:
        tokens = prompt(1, 3)
        kv = store(executor, tokens, 1)
        store(executor, prompt(2, 6), 2)
        executor.drain()
        engine.acquire(tokens, keep=0, load="all").release()
        executor.drain()
        assert manager.stats().moves == 0
        lease = manager.acquire(tokens, now=executor.clock(), keep=0, load="all")
        executor.poll()
        assert list(engine.retrieve_layer(lease)) == [12, *range(LAYERS), 12]
        assert torch.equal(layer_of(pools[0], lease, 12, 0), kv[0])
        lease.release()


def test_a_store_that_nobody_waits_for_waits_while_a_demand_load_runs():
    manager, pools = world(gpu=6, write="through")
    gpu = pools[0] = Gate(SHAPE, 6, SIZE)
    host = pools[1] = Gate(SHAPE, 60, SIZE)
    gpu.open()
    host.open()
    with Executor(manager, pools, workers=2) as executor:
        tokens = prompt(1, 3)
        store(executor, tokens, 1)
        executor.drain()
        store(executor, prompt(2, 6), 2)
        executor.drain()
        gpu.shut()
        lease = manager.acquire(tokens, now=executor.clock(), keep=0, load="all")
        executor.poll()
        assert gpu.entered.acquire(timeout=30)  # the load runs
        host.diary.clear()
        mine = prompt(3, 2)
        with manager.acquire(mine, now=executor.clock(), keep=0) as other:
            other.commit(mine, now=executor.clock())
        executor.poll()
        assert host.diary == []  # with a second worker idle
        gpu.open()
        executor.wait(lease)
        executor.drain()
        assert host.diary
        lease.release()


@dataclass
class Time:
    now: int = 1_000_000_000

    def __call__(self):
        return self.now


def budgeted(*, write="back"):
    """Two tiers with an I/O budget of one block per second on the second, and a clock to set."""
    block = SHAPE.block_bytes(SIZE)
    tiers = [Tier("gpu", blocks=6, write=write), Tier("host", blocks=60, io_budget=block)]
    manager = BlockManager(SHAPE, tiers, block_tokens=SIZE)
    gpu, _ = open_pools(SHAPE, tiers, SIZE)
    host = Gate(SHAPE, 60, SIZE)
    host.open()
    time = Time()
    return Executor(manager, [gpu, host], clock=time, moves_per_job=1), host, time


def one_a_second(executor, host, time, blocks):
    """As many copies come as seconds have passed, and one at once."""
    for done in range(1, blocks + 1):
        assert host.entered.acquire(timeout=30)
        assert len(host.diary) == done
        time.now += 1_000_000_000
        with executor.runner.section:
            executor.runner.section.notify_all()


def test_background_copies_keep_to_the_budget_of_their_tiers():
    executor, host, time = budgeted(write="through")
    with executor:
        tokens = prompt(1, 3)
        with executor.manager.acquire(tokens, now=time(), keep=0) as lease:
            lease.commit(tokens, now=time())
        executor.poll()
        one_a_second(executor, host, time, 3)
        executor.drain()


@pytest.mark.parametrize("what", ["flush", "save"])
def test_what_is_written_down_at_the_end_keeps_to_the_budget_too(what):
    executor, host, time = budgeted()
    with executor:
        tokens = prompt(1, 3)
        with executor.manager.acquire(tokens, now=time(), keep=0) as lease:
            lease.commit(tokens, now=time())
        assert host.diary == []
        ending = threading.Thread(target=getattr(executor, what))
        ending.start()
        one_a_second(executor, host, time, 3)
        ending.join()


def test_a_lane_learns_what_its_copies_show():
    slow = Lane("up", bytes_per_s=1e6)
    tiers = [Tier("gpu", blocks=4), Tier("host", blocks=40, read=slow)]
    manager = BlockManager(SHAPE, tiers, block_tokens=SIZE)
    executor = Executor(manager, open_pools(SHAPE, tiers, SIZE), workers=0, learn=True)
    feedback = executor.feedback

    @dataclass
    class Copy:
        tiers: tuple = (1, 0)
        store: bool = False

    now = 0
    for size in (4 << 20, 8 << 20, 2 << 20, 16 << 20, 4 << 20):  # 1 ms, and 2 ns per KiB
        feedback.began(Copy(), now)
        now += 1_000_000 + size * 2 // 1024
        feedback.ended(Copy(), now, brought=size)
        now += 500
    learned = feedback.lanes()["up"]
    assert learned.bytes_per_s == pytest.approx(1024 / 2 * 1e9, rel=1e-3)
    assert learned.latency_ns == pytest.approx(1_000_000, rel=1e-2)
    sent = manager.transmit("up", 4, now=now)
    assert sent.end - now == pytest.approx(1_000_000, rel=0.01)
    for size in (4 << 20, 8 << 20, 2 << 20, 16 << 20) * 20:  # as a GPU reports: 2 ms, 1 ns per KiB
        feedback.took(Copy(), size, 2_000_000 + size // 1024)
    learned = feedback.lanes()["up"]
    assert learned.bytes_per_s == pytest.approx(1024 * 1e9, rel=0.01)
    assert learned.latency_ns == pytest.approx(2_000_000, rel=0.01)
    executor.close()


def test_a_lane_learns_from_what_a_pass_stores():
    manager, pools = world(gpu=5000, host=9000, write="through", staging=5000)
    with Executor(manager, pools) as executor, LayerwiseEngine(executor) as engine:
        tokens = prompt(1, 5000)  # a layer of it is more than a megabyte
        with engine.acquire(tokens, keep=0) as lease:
            assert len(list(engine.store_layer(lease, tokens))) == LAYERS + 1
        executor.drain()
        assert [*executor.feedback.lanes()] == [manager.tiers[1].lanes()[1].name]


def test_predicted_and_seen_times_are_recorded():
    manager, pools = world()
    with Executor(manager, pools) as executor, LayerwiseEngine(executor) as engine:
        tokens = prompt(1, 3)
        kv = store(executor, tokens, 1)
        store(executor, prompt(2, 6), 2)
        executor.drain()
        assert executor.feedback.error_ns() is None
        retrieved(engine, tokens, kv)
        sights = list(executor.feedback.layers)
        assert [sight.layer for sight in sights] == list(range(LAYERS))
        assert all(sight.predicted_ns > 0 for sight in sights)
        assert executor.feedback.error_ns() is not None


def test_staging_bounds_what_is_ahead():
    manager, pools = world()
    one = 12 * 2 * 2 * 4 * 4  # a layer of 12 tokens
    with (
        Executor(manager, pools) as executor,
        LayerwiseEngine(
            executor, Layerwise(blending=True, look_ahead=9, staging_bytes=2 * one)
        ) as engine,
    ):
        tokens = prompt(1, 3)
        store(executor, tokens, 1)
        store(executor, prompt(2, 6), 2)
        executor.drain()
        with engine.acquire(tokens, keep=0, load="all") as lease:
            for _ in engine.retrieve_layer(lease):
                assert engine.connector.buffer_bytes_in_use <= 2 * one
        assert engine.connector.buffer_bytes_in_use == 0
        longer = prompt(5, 6)
        store(executor, longer, 5)
        executor.drain()
        tight = LayerwiseEngine(executor, Layerwise(blending=True, staging_bytes=one))
        with engine.acquire(longer, keep=0, load="all") as lease:
            with pytest.raises(NoSpaceError, match="staging has"):
                list(tight.retrieve_layer(lease))
            executor.wait(lease)


@pytest.mark.parametrize(
    "wrong", [{"look_ahead": -1}, {"staging_bytes": 0}, {"readers": 0}], ids=str
)
def test_settings_that_cannot_be_are_refused(wrong):
    with pytest.raises(ConfigError, match="wanted"):
        Layerwise(**wrong)


def test_a_tier_that_is_not_written_through_stores_no_layers():
    manager, pools = world(staging=3)
    with Executor(manager, pools) as executor, LayerwiseEngine(executor) as engine:
        tokens = prompt(1, 1)
        with (
            engine.acquire(tokens, keep=0) as lease,
            pytest.raises(ConfigError, match="write='through', not 'back'"),
        ):
            next(engine.store_layer(lease, tokens))
