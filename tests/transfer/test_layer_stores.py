"""`LayerStores`: layers are stored while later ones compute; all spare blocks or none."""

from contextlib import closing

import pytest
import torch
from layer_world import LAYERS, Slow, compute, world
from rig import SHAPE, SIZE, fetch, prompt, rows, store

from kvtrie.errors import ConfigError, NoSpaceError
from kvtrie.transfer import Executor, LayerwiseEngine


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


def test_a_tier_that_is_not_written_through_stores_no_layers():
    manager, pools = world(staging=3)
    with Executor(manager, pools) as executor, LayerwiseEngine(executor) as engine:
        tokens = prompt(1, 1)
        with (
            engine.acquire(tokens, keep=0) as lease,
            pytest.raises(ConfigError, match="write='through', not 'back'"),
        ):
            next(engine.store_layer(lease, tokens))
