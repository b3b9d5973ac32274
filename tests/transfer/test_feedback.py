"""`Feedback`: lanes learn their speed from copies, and layers report predicted and real times."""

from dataclasses import dataclass

import pytest
from layer_world import LAYERS, retrieved, world
from rig import SHAPE, SIZE, prompt, store

from kvtrie import BlockManager, Lane, Tier
from kvtrie.tiers import open_pools
from kvtrie.transfer import Executor, LayerwiseEngine


def test_a_lane_learns_what_its_copies_show():
    slow = Lane("up", bytes_per_s=1e6)
    tiers = [Tier("gpu", blocks=4), Tier("host", blocks=40, read=slow)]
    manager = BlockManager(SHAPE, tiers, block_tokens=SIZE)
    executor = Executor(manager, open_pools(SHAPE, tiers, SIZE), workers=0)
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
    for size in (4 << 20, 8 << 20, 2 << 20, 16 << 20) * 20:  # as a GPU reports: 2 ms, 1 ns per KiB
        feedback.record_copy_time(Copy(), size, 2_000_000 + size // 1024)
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
        assert not executor.feedback.layers
        retrieved(engine, tokens, kv)
        sights = list(executor.feedback.layers)
        assert [sight.layer for sight in sights] == list(range(LAYERS))
        assert all(sight.predicted_ns > 0 for sight in sights)
