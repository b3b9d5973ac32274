"""`Claims`: loads that an engine has claimed and does not carry out are the threads' again."""

import torch
from layer_world import LAYERS, layer_of, world
from rig import prompt, store

from kvtrie.transfer import Executor, LayerwiseEngine


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


def test_a_lease_that_waits_gets_the_loads_that_another_has_claimed_and_left():
    manager, pools = world()
    with Executor(manager, pools) as executor, LayerwiseEngine(executor) as engine:
        tokens = prompt(1, 3)
        kv = store(executor, tokens, 1)
        store(executor, prompt(2, 6), 2)
        executor.drain()
        idle = engine.acquire(tokens, keep=0, load="all")
        lease = manager.acquire(tokens, now=executor.clock(), keep=0, load="all")
        assert set(lease.after.tolist()) == set(idle.after.tolist()) != set()
        executor.wait(lease)
        assert lease.matched == 12
        for layer in range(LAYERS):
            assert torch.equal(layer_of(pools[0], lease, 12, layer), kv[layer])
        # The loads of the first are done.
        assert list(engine.retrieve_layer(idle)) == [12, *range(LAYERS), 12]
        idle.release()
        lease.release()
