"""The three streams of the layer-wise engine on a CUDA device, and their waits for each other."""

import numpy as np
import pytest
import torch
from rig import SHAPE, SIZE, prompt

from kvtrie import BlockManager, Tier
from kvtrie.tiers import open_pools
from kvtrie.transfer import Executor, Layerwise, LayerwiseEngine, Request

pytestmark = pytest.mark.gpu

LAYERS = SHAPE.layers
BUSY = 1 << 31
"""Cycles for which a computation keeps the GPU: about a second, a thousand times a copy here."""

SETTINGS = [Layerwise(), Layerwise(use_gpu=True, staging_bytes=3000), Layerwise(blending=True)]


@pytest.fixture
def world():
    tiers = [Tier("gpu", blocks=6, write="through"), Tier("host", blocks=60)]
    manager = BlockManager(SHAPE, tiers, block_tokens=SIZE)
    pools = open_pools(SHAPE, tiers, SIZE, staging=6)
    assert [pool.device.type for pool in pools] == ["cuda", "cpu"]
    with Executor(manager, pools) as executor:
        yield executor


def layer_of(pool, lease, tokens, layer):
    at = torch.arange(tokens, device=pool.device)
    return torch.stack(pool.gather(pool.table(lease.slots(0))[layer][at // SIZE], at % SIZE))


def compute(engine, lease, tokens, kv, *, cycles=0):
    """A pass that stores by layer: each layer's KV is written after this number of cycles."""
    pool = engine.executor.pools[0]
    at = torch.arange(len(tokens), device=pool.device)
    table = pool.table(lease.slots(0))
    steps = engine.store_layer(lease, tokens)
    for layer in range(LAYERS):
        torch.cuda._sleep(cycles)
        pool.scatter(table[layer][at // SIZE], at % SIZE, *kv[layer])
        assert next(steps) == layer
    assert len(next(steps).new) == len(tokens) // SIZE
    assert next(steps, None) is None


def away(engine, tokens, seed):
    """Keep a prompt and send it to the host; its KV."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    made = []
    for seen in (tokens, prompt(seed + 1000, 6)):
        kv = torch.randn(LAYERS, 2, len(seen), 2, 4, generator=generator, device="cuda")
        with engine.acquire(seen, keep=0) as lease:
            compute(engine, lease, seen, kv)
        engine.executor.drain()
        made.append(kv)
    return made[0]


def test_there_are_three_streams(world):
    with LayerwiseEngine(world) as engine:
        streams = {engine.load.cuda, engine.store.cuda, torch.cuda.current_stream()}
        assert len({stream.cuda_stream for stream in streams}) == 3


@pytest.mark.parametrize("settings", SETTINGS, ids=["direct", "staged", "blending"])
def test_a_layer_is_there_before_the_computation_that_reads_it(world, settings):
    with LayerwiseEngine(world, settings) as engine:
        tokens = prompt(1, 3)
        kv = away(engine, tokens, 1)
        with engine.acquire(tokens, keep=0, load="all") as lease:
            seen = []
            steps = engine.retrieve_layer(lease)
            assert next(steps) == 12
            for layer in range(LAYERS):
                assert next(steps) == layer
                seen.append(layer_of(world.pools[0], lease, 12, layer).clone())
                if settings.blending:
                    seen[-1] = torch.stack(engine.buffer(lease, layer)).clone()
            assert next(steps) == 12
        assert torch.equal(torch.stack(seen), kv)


def test_what_is_stored_was_computed_before(world):
    with LayerwiseEngine(world) as engine:
        tokens = prompt(2, 3)
        kv = torch.randn(LAYERS, 2, 12, 2, 4, device="cuda")
        with engine.acquire(tokens, keep=0) as lease:
            compute(engine, lease, tokens, kv, cycles=BUSY >> 4)
        world.drain()
        away(engine, prompt(3, 3), 3)
        with engine.acquire(tokens, keep=0, load="all") as lease:
            assert list(engine.retrieve_layer(lease)) == [12, *range(LAYERS), 12]
            for layer in range(LAYERS):
                assert torch.equal(layer_of(world.pools[0], lease, 12, layer), kv[layer])


def test_the_next_layer_comes_while_one_computes(world):
    with LayerwiseEngine(world) as engine:
        tokens = prompt(4, 3)
        away(engine, tokens, 4)
        with engine.acquire(tokens, keep=0, load="all") as lease:
            steps = engine.retrieve_layer(lease)
            next(steps)
            assert next(steps) == 0
            torch.cuda._sleep(BUSY)
            computed = torch.cuda.current_stream().record_event()
            engine.load.synchronize()  # the issued loads: layers 1 and 2
            assert not computed.query()
            assert list(steps) == [*range(1, LAYERS), 12]


def test_a_batch_waits_once_per_layer(world):
    with LayerwiseEngine(world) as engine:
        prompts = [prompt(seed, 2) for seed in (5, 6)]
        written = [away(engine, tokens, seed) for seed, tokens in enumerate(prompts, 5)]
        fresh = np.arange(1)
        leases = [
            engine.acquire(np.concatenate([tokens, fresh]), keep=0, load="all")
            for tokens in prompts
        ]
        batch = [Request(lease, fresh) for lease in leases]
        assert engine.start_load_kv(batch) == [8, 8]
        waits = engine.current.waits
        for layer in range(LAYERS):
            engine.wait_for_layer_load(layer)
            assert engine.current.waits == waits + layer + 1
            for lease, kv in zip(leases, written, strict=True):
                assert torch.equal(layer_of(world.pools[0], lease, 8, layer), kv[layer])
            engine.save_kv_layer(layer)
        engine.wait_for_save()
        for lease in leases:
            lease.release()
