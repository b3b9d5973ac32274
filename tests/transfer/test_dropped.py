"""An executor or engine without references keeps no thread, move or lease."""

import gc
import threading
import weakref

import pytest
import torch
from rig import fetch, gated, prompt, store, world

from kvtrie.transfer import Executor, LayerwiseEngine


def threads():
    return {thread for thread in threading.enumerate() if thread.name.startswith("kvtrie-")}


def ended(some):
    for thread in some:
        thread.join(timeout=30)
    return not any(thread.is_alive() for thread in some)


def takes_over(manager, pools, tokens, stored):
    """Whether another executor carries out all that is left, and has what was stored."""
    with Executor(manager, pools) as executor:
        executor.drain()
        manager.audit()
        assert (manager.stats().moves, manager.stats().leases) == (0, 0)
        return torch.equal(fetch(executor, tokens), stored)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_executor_that_is_dropped_holds_no_thread_and_no_move(workers):
    manager, pools = world(gpu=6, host=40)
    before = threads()
    executor = Executor(manager, pools, workers=workers)
    store(executor, prompt(1, 3), 1)
    stored = store(executor, prompt(2, 3), 2)
    mine, gone = threads() - before, weakref.ref(executor)
    with manager.acquire(prompt(3, 3), now=executor.clock()):
        # Stores of the first prompt are under way or wait for a thread; their slots are taken.
        executor.poll()
        del executor
        gc.collect()
        assert ended(mine)
        assert gone() is None
    assert takes_over(manager, pools, prompt(2, 3), stored)


def test_an_executor_that_is_dropped_lets_its_copy_end():
    manager, (gpu, host) = gated(gpu=3)
    before = threads()
    executor = Executor(manager, (gpu, host), workers=1, moves_per_job=1)
    stored = store(executor, prompt(1, 3), 1)
    host.shut()
    with manager.acquire(prompt(2, 3), now=executor.clock()):
        executor.poll()
        assert host.entered.acquire(timeout=30)
        mine, gone = threads() - before, weakref.ref(executor)
        del executor
        gc.collect()
        host.open()
        assert ended(mine)
        assert gone() is None
    gpu.open()
    assert takes_over(manager, (gpu, host), prompt(1, 3), stored)


def test_an_engine_that_is_dropped_holds_no_thread_and_no_move():
    manager, pools = world(gpu=3, host=40)
    before = threads()
    executor = Executor(manager, pools)
    engine = LayerwiseEngine(executor)
    stored = store(executor, prompt(1, 3), 1)
    executor.drain()
    store(executor, prompt(2, 3), 2)
    executor.drain()
    with engine.acquire(prompt(1, 3), keep=0, load="all") as lease:
        steps = engine.retrieve_layer(lease)
        assert next(steps) == 12
        next(steps)
        mine, gone = threads() - before, [weakref.ref(executor), weakref.ref(engine)]
        del steps, engine, executor
        gc.collect()
        assert ended(mine)
        assert [ref() for ref in gone] == [None, None]
    assert takes_over(manager, pools, prompt(1, 3), stored)
