"""`LayerLoads`: each layer is there when it is yielded, and an abort gives all moves back."""

import threading
from contextlib import closing

import numpy as np
import pytest
import torch
from layer_world import LAYERS, WORLDS, Deadlock, Slow, compute, layer_of, retrieved, world
from rig import SHAPE, SIZE, prompt, store

from kvtrie.errors import TransferError
from kvtrie.transfer import Executor, Layerwise, LayerwiseEngine


@pytest.mark.grid
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
            loaded = np.setdiff1d(np.arange(lease.matched), lease.plan.recompute())
            assert len(loaded) > 0
            for layer in range(LAYERS):
                found = layer_of(pools[0], lease, lease.matched, layer)
                assert torch.equal(found[:, loaded], kv[layer][:, loaded])


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
