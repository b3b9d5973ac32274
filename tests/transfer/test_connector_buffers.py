"""Passes over layers count the memory that they stage outside the tiers, and free all of it."""

from contextlib import closing

import numpy as np
import pytest
from layer_world import LAYERS, WORLDS, world
from rig import prompt, store

from kvtrie.errors import NoSpaceError
from kvtrie.transfer import Executor, Layerwise, LayerwiseEngine, Request

UNIT = 256
WAYS = {
    "direct": Layerwise(),
    "staged": Layerwise(use_gpu=True, staging_bytes=3000),
    "blending": Layerwise(blending=True),
    "staged and blending": Layerwise(blending=True, use_gpu=True, staging_bytes=3000),
}


@pytest.fixture(params=WAYS.values(), ids=WAYS)
def way(request):
    return request.param


def begin(way, **kinds):
    manager, pools = world(**{"write": "through", "staging": 6, **kinds})
    executor = Executor(manager, pools)
    return executor, LayerwiseEngine(executor, way)


def away(executor):
    """Store a prompt and send it below."""
    tokens = prompt(1, 3)
    store(executor, tokens, 1)
    executor.flush()
    store(executor, prompt(2, 6), 2)
    executor.drain()
    return tokens


@pytest.mark.grid
@pytest.mark.parametrize("name", [name for name in WORLDS if name != "layer slots"])
@pytest.mark.parametrize("step", range(LAYERS + 3))
def test_nothing_is_staged_after_a_load_that_ends_at_any_layer(way, name, step):
    executor, engine = begin(way, **WORLDS[name])
    with executor, engine:
        tokens = away(executor)
        with engine.acquire(tokens, keep=0, load="all") as lease:
            with closing(engine.retrieve_layer(lease)) as steps:
                for _ in range(min(step, LAYERS + 2)):
                    next(steps)
                    engine.load.synchronize()
                    assert executor.staged_bytes <= 2 * 3000 or not way.use_gpu
                if step == 2 and way.use_gpu and name == "host":
                    assert executor.staged_bytes > 0
                if step > LAYERS + 2:
                    assert next(steps, None) is None
            assert executor.staged_bytes == 0
        executor.drain()
        executor.manager.audit()


@pytest.mark.parametrize("step", range(LAYERS + 2))
def test_nothing_is_staged_after_a_store_that_ends_at_any_layer(way, step):
    executor, engine = begin(way)
    with executor, engine:
        tokens = prompt(1, 3)
        with engine.acquire(tokens, keep=0) as lease:
            with closing(engine.store_layer(lease, tokens)) as steps:
                for done in range(step):
                    next(steps)
                    engine.store.synchronize()
                    buffers = 3000 // UNIT * UNIT if way.use_gpu else 0
                    spare = 3 * LAYERS * UNIT if done < LAYERS else 0
                    assert executor.staged_bytes == spare + buffers
            assert executor.staged_bytes == 0
        executor.drain()
        executor.manager.audit()


@pytest.mark.parametrize("step", range(2 * LAYERS + 2))
def test_nothing_is_staged_after_a_pass_that_ends_at_any_layer(way, step):
    """Load, compute and store layer by layer; `wait_for_save` at the end, or `abort` before it."""
    executor, engine = begin(way, gpu=8)
    with executor, engine:
        tokens, fresh = away(executor), prompt(3, 1)
        with engine.acquire(np.concatenate([tokens, fresh]), keep=0, load="all") as lease:
            engine.start_load_kv([Request(lease, fresh)])
            for at in range(min(step, 2 * LAYERS)):
                (engine.save_kv_layer if at % 2 else engine.wait_for_layer_load)(at // 2)
                if at == 1:
                    assert executor.staged_bytes >= LAYERS * UNIT
            if step > 2 * LAYERS:
                engine.wait_for_save()
            else:
                engine.abort()
            assert executor.staged_bytes == 0
        executor.drain()
        executor.manager.audit()


def test_two_requests_share_the_buffers_until_both_have_ended():
    executor, engine = begin(WAYS["staged"])
    with executor, engine:
        tokens = away(executor)
        leases = [engine.acquire(tokens, keep=0, load="all") for _ in range(2)]
        first, second = (engine.retrieve_layer(lease) for lease in leases)
        for steps in (first, second):
            next(steps)
            next(steps)
        engine.load.synchronize()
        assert executor.staged_bytes > 0
        first.close()
        assert executor.staged_bytes > 0
        second.close()
        assert executor.staged_bytes == 0
        for lease in leases:
            lease.release()


def test_a_store_without_room_stages_nothing():
    executor, engine = begin(WAYS["staged"], staging=2)
    with executor, engine, engine.acquire(prompt(1, 3), keep=0) as lease:
        with pytest.raises(NoSpaceError):
            next(engine.store_layer(lease, prompt(1, 3)))
        assert executor.staged_bytes == 0


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
