"""`io_budget`: background copies of a tier keep to its bytes per second."""

import threading

import pytest
from rig import SHAPE, SIZE, Gate, Time, prompt

from kvtrie import BlockManager, Tier
from kvtrie.tiers import open_pools
from kvtrie.transfer import Executor


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
        executor.runner.wake()


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
