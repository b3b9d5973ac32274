"""A disk's queue is used: blocks of a lease are under way together, and fail one by one.

The device counts what is under way; no clock is asked.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest
from keeping import SECOND, SHAPE, SIZE, Clock, ask, fill, prompt, serving

from kvtrie._kvtrie import Faults
from kvtrie.tiers import Batched
from kvtrie.transfer import Layerwise, LayerwiseEngine

BLOCKS = 8
ONE = 2  # operations of one block: its header pages and its layers


@pytest.mark.parametrize("queue", ["best", "threads"])
@pytest.mark.parametrize("workers", [0, 2])
def test_the_loads_of_a_lease_are_under_way_together(tmp_path, queue, workers):
    tokens = prompt(1, BLOCKS)
    fill(tmp_path, [tokens], gpu=12, host=12)
    faults = Faults(queue=queue)
    with serving(tmp_path, gpu=12, host=12, faults=faults, workers=workers) as executor:
        assert isinstance(executor.pools[2], Batched)
        assert executor.restore() == BLOCKS
        faults.most_at_once()
        assert ask(executor, tokens) == len(tokens)
        operations, _ = faults.most_at_once()
        assert operations == BLOCKS * ONE
        executor.drain()
        executor.manager.audit()


@pytest.mark.parametrize("workers", [0, 2])
def test_stores_are_under_way_together(tmp_path, workers):
    faults = Faults()
    with serving(tmp_path, gpu=12, host=12, faults=faults, workers=workers) as executor:
        ask(executor, prompt(1, BLOCKS))
        faults.most_at_once()
        executor.flush()
        operations, _ = faults.most_at_once()
        assert operations > workers * ONE + ONE
        assert executor.manager.failed() == []


def test_a_batch_is_as_large_as_a_job_may_be(tmp_path):
    tokens = prompt(1, BLOCKS)
    fill(tmp_path, [tokens], gpu=12, host=12)
    faults = Faults()
    with serving(tmp_path, gpu=12, host=12, faults=faults, moves_per_job=3) as executor:
        executor.restore()
        faults.most_at_once()
        assert ask(executor, tokens) == len(tokens)
        assert faults.most_at_once()[0] == 3 * ONE


@pytest.mark.parametrize("workers", [0, 2])
def test_only_the_bad_block_of_a_batch_fails(tmp_path, workers):
    prompts = [prompt(seed) for seed in range(BLOCKS)]
    fill(tmp_path, prompts)
    faults = Faults()
    with serving(tmp_path, gpu=12, host=12, faults=faults, workers=workers) as executor:
        executor.restore()
        now = executor.clock
        leases = [executor.manager.acquire(one, now=now(), keep=0, load="all") for one in prompts]
        faults.inject("read", after=2 * ONE)
        for lease in leases:
            executor.wait(lease)
        assert faults.injected("read") == 1
        assert [lease.matched for lease in leases].count(0) == 1
        assert [lease.matched for lease in leases].count(SIZE) == BLOCKS - 1
        (failed,) = executor.manager.failed()
        assert "error 5" in failed.reason
        for lease in leases:
            lease.release()
        executor.drain()
        # Blocks that failed to load are computed again; after that all are there.
        for missing in (1, 0):
            found = sum(ask(executor, one) for one in prompts)
            assert found == (BLOCKS - missing) * SIZE
        executor.manager.audit()


def test_a_batch_that_hangs_is_failed_at_its_deadline_and_ends_later(tmp_path):
    tokens, clock, faults = prompt(1, BLOCKS), Clock(SECOND), Faults()
    fill(tmp_path, [tokens], gpu=12, host=12)
    settings = {"faults": faults, "clock": clock, "deadline_s": 2.0, "workers": 2}
    with serving(tmp_path, gpu=12, host=12, **settings) as executor:
        manager = executor.manager
        executor.restore()
        ask(executor, prompt(2))
        faults.close_gate(["read"])
        lease = manager.acquire(tokens, now=clock(), keep=0, load="all")
        executor.poll()
        faults.wait_for(1)
        clock.now += 3 * SECOND
        executor.poll()
        assert lease.ready()
        assert lease.matched == 0
        assert "no end after 3.000 s" in manager.failed()[0].reason
        lease.release()
        assert ask(executor, prompt(2)) == SIZE  # the other worker is there
        manager.audit()
        faults.open_gate()
        while executor.poll():
            pass
        assert [ask(executor, tokens), ask(executor, tokens)] == [0, len(tokens)]
        executor.drain()
        manager.audit()


def test_a_layer_of_many_blocks_is_under_way_together(tmp_path):
    tokens = prompt(1, BLOCKS)
    fill(tmp_path, [tokens], gpu=12, host=12)
    faults = Faults()
    with (
        serving(tmp_path, gpu=12, host=12, faults=faults, workers=2) as executor,
        LayerwiseEngine(executor, Layerwise(look_ahead=0)) as engine,
        ThreadPoolExecutor(1) as caller,
    ):
        executor.restore()
        with engine.acquire(tokens, keep=0, load="all") as lease:
            faults.close_gate(["read"])
            steps_seen = caller.submit(lambda: list(engine.retrieve_layer(lease)))
            faults.wait_for(2)  # both readers have begun
            faults.most_at_once()
            faults.open_gate()
            assert steps_seen.result() == [len(tokens), *range(SHAPE.layers), len(tokens)]
        # Each of two readers has half of the blocks; one at a time they would be two operations.
        assert faults.most_at_once()[0] >= BLOCKS // 2 * ONE
