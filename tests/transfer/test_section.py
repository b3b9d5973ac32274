"""Ctrl-C at any point: all moves still end, and no lease, move or thread is left."""

import random
import signal
import threading
from functools import partial

import pytest
import torch
from ctrl_c import CtrlC
from rig import SHAPE, SIZE, fetch, prompt, store, working, world

from kvtrie import BlockManager, Tier
from kvtrie.tiers import DiskStorage, Pool, open_pools
from kvtrie.transfer import Executor

CALLS = ("wait", "flush", "drain", "poll", "save", "cancel", "close")


def opened(folder, workers):
    """Three tiers, the last of files."""
    tiers = [Tier("gpu", blocks=4), Tier("host", blocks=8), Tier("disk", blocks=64)]
    manager = BlockManager(SHAPE, tiers, block_tokens=SIZE)
    gpu, host, _ = open_pools(SHAPE, tiers, SIZE)
    disk = DiskStorage(folder, SHAPE, 64, SIZE, durability="none")
    return Executor(manager, [gpu, host, disk], workers=workers, deadline_s=60.0)


def busy(executor, seed):
    """A lease that awaits loads, which wait for stores that have not begun."""
    manager = executor.manager
    store(executor, prompt(seed, 3), seed)
    return manager.acquire(prompt(seed - 3, 3), now=executor.clock(), keep=0, load="all")


def interrupted(call, at):
    """Make a call that is interrupted at a point; how many points it has had."""
    ctrl_c = CtrlC(at)
    try:
        with ctrl_c:
            call()
    except KeyboardInterrupt:
        assert ctrl_c.struck is not None
    else:
        assert ctrl_c.struck is None, f"swallowed at {ctrl_c.struck}"
    return ctrl_c


def unharmed(executor, seed):
    """Whether everything has ended and works as before."""
    manager = executor.manager
    executor.drain()
    manager.audit()
    stats = manager.stats()
    assert (stats.moves, stats.leases, executor.poll()) == (0, 0, 0)
    stored = store(executor, prompt(10**6 + seed, 2), seed)
    assert torch.equal(fetch(executor, prompt(10**6 + seed, 2)), stored)
    executor.drain()


def strike(folder, workers, points, draw):
    """Interrupt the calls in turn, at `points` random points in all."""
    executor, most = opened(folder, workers), dict.fromkeys(CALLS, 400)
    with executor.pools[2]:
        for seed in range(1, 4):
            store(executor, prompt(seed, 3), seed)
        for number in range(points):
            name, seed = CALLS[number % len(CALLS)], number + 4
            with busy(executor, seed) as lease:
                call = partial(getattr(executor, name), *([lease] if name == "wait" else []))
                done = interrupted(call, draw.randrange(1, most[name] + 1))
                most[name] = max(most[name], done.passed) if done.struck else done.passed
            if name == "close":
                executor.close()  # and another one goes on with what it had not begun
                settings = {"workers": workers, "deadline_s": 60.0}
                executor = Executor(executor.manager, executor.pools, **settings)
            unharmed(executor, seed)
        executor.close()
    assert working() == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("interruptible")
@pytest.mark.timeout(60)
@pytest.mark.parametrize("workers", [0, 2])
def test_an_interrupt_at_any_point_leaves_neither_move_nor_lease(workers, tmp_path):
    strike(tmp_path, workers, 56, random.Random(workers))


@pytest.mark.deep
@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_thousand_interrupts_leave_neither_move_nor_lease(workers, tmp_path):
    strike(tmp_path, workers, 1000, random.Random(100 + workers))


class Striking(Pool):
    """A pool that sends the main thread Ctrl-C with every third copy, whose end that awaits."""

    copies = 0

    def copy_from(self, source, source_units, units):
        self.copies += 1
        if self.copies % 3 == 0:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        super().copy_from(source, source_units, units)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.timeout(60)
@pytest.mark.parametrize("workers", [0, 1])
def test_an_interrupt_of_whoever_waits_lets_the_copies_end(workers):
    manager, pools = world(gpu=4, host=40)
    pools[1] = Striking(SHAPE, 40, SIZE)
    interrupts = 0
    with Executor(manager, pools, workers=workers, moves_per_job=1) as executor:
        for seed in range(1, 12):
            while True:  # repeat the interrupted call until it returns
                try:
                    if seed % 2:
                        executor.drain()
                    else:
                        executor.flush()
                    with manager.acquire(prompt(seed, 3), now=executor.clock(), keep=0) as lease:
                        executor.wait(lease)
                        lease.commit(prompt(seed, 3)[lease.matched :], now=executor.clock())
                    executor.drain()
                    break
                except KeyboardInterrupt:
                    interrupts += 1
            manager.audit()
            assert (manager.stats().moves, manager.stats().leases) == (0, 0)
    assert pools[1].copies // 3 >= interrupts > 4
    assert manager.failed() == []
