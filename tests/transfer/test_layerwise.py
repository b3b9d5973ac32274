"""The layer-wise engine: batches, its settings, and stores that give way to demand loads."""

import numpy as np
import pytest
import torch
from layer_world import LAYERS, layer_of, world
from rig import SHAPE, SIZE, Gate, prompt, store

from kvtrie.errors import ConfigError
from kvtrie.transfer import Executor, Layerwise, LayerwiseEngine, Request


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


@pytest.mark.parametrize(
    "wrong", [{"look_ahead": -1}, {"staging_bytes": 0}, {"readers": 0}], ids=str
)
def test_settings_that_cannot_be_are_refused(wrong):
    with pytest.raises(ConfigError, match="wanted"):
        Layerwise(**wrong)
