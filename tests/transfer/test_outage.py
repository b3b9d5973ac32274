"""Devices that hang or raise: the executor goes on, reports it, and ends every wait."""

import queue
import threading

import pytest
import torch
from rig import SHAPE, SIZE, Shelf, Time, away, fetch, gated, prompt, rows, store, working

from kvtrie import BlockManager, Tier
from kvtrie.errors import NoSpaceError, TransferError
from kvtrie.tiers import Pool
from kvtrie.transfer import Executor

SECOND = 1_000_000_000
LATE = "the move ended past its deadline"


def patient(manager, pools, clock, workers=1, **settings):
    """An executor with a deadline of two seconds that puts the end of every move in a queue."""
    ends = queue.SimpleQueue()

    def progress(news):
        if news.error is not None or news.layers_done == news.layers:
            ends.put(news)

    settings = {"deadline_s": 2.0, "clock": clock, "progress": progress, **settings}
    return Executor(manager, pools, workers=workers, **settings), ends


def hang(executor, gate, workers=1):
    """Let as many moves pass their deadline as have entered the gate, which is shut."""
    for _ in range(workers):
        assert gate.entered.acquire(timeout=30)
    executor.clock.now += 2 * SECOND


def over(ends):
    """Wait for the end of a move that hung; skip other moves that end before it."""
    while (news := ends.get(timeout=30)).error != LATE:
        pass
    return news


def all_free(executor):
    """Whether nothing moves and a request can have all of the first tier."""
    manager, blocks = executor.manager, executor.pools[0].blocks
    manager.audit()
    if manager.stats().moves:
        return False
    try:
        with manager.acquire(prompt(10**6, blocks), now=executor.clock()) as whole:
            executor.wait(whole)
            fits = whole.room == blocks * SIZE
    except NoSpaceError:
        return False
    executor.drain()
    return fits


def test_a_move_past_its_deadline_fails_and_keeps_its_slots_until_it_ends():
    manager, (gpu, host) = gated(gpu=3)
    clock = Time()
    executor, ends = patient(manager, (gpu, host), clock)
    with executor:
        store(executor, prompt(1, 3), 1)
        host.shut()
        lease = manager.acquire(prompt(2, 3), now=clock())
        executor.poll()
        assert host.entered.acquire(timeout=30)
        clock.now += 2 * SECOND - 1
        executor.poll()
        assert manager.failed() == []
        clock.now += 1
        assert executor.poll() > 0  # it still runs
        assert any("no end after 2.0" in row.reason for row in manager.failed())
        manager.audit()
        lease.release()
        assert not all_free(executor)
        host.open()
        assert over(ends).layers_done == 0
        executor.drain()
        assert all_free(executor)


@pytest.mark.parametrize("workers", [1, 2])
def test_while_every_worker_hangs_requests_go_on_without_what_they_wanted(workers):
    manager, (gpu, host) = gated(gpu=8, write="through")
    clock = Time()
    executor, ends = patient(manager, (gpu, host), clock, workers, moves_per_job=1)
    wanted, others = prompt(1, 2), [prompt(seed, 1) for seed in (2, 3)]
    with executor:
        stored = away(executor, wanted, 1)
        host.shut()
        for seed, tokens in enumerate(others):
            store(executor, tokens, seed + 2)
        executor.poll()
        for _ in range(workers):
            assert host.entered.acquire(timeout=30)
        lease = manager.acquire(wanted, now=clock(), keep=0, load="all")
        executor.poll()
        clock.now += 2 * SECOND
        assert lease.matched == 8
        executor.wait(lease)
        assert lease.matched == 0
        assert any("every worker hangs" in row.reason for row in manager.failed() if row.lease)
        assert lease.room >= 8
        lease.release()

        later = manager.acquire(wanted, now=clock(), keep=0, load="all")
        assert later.matched == 8  # no block was marked as lost
        executor.wait(later)
        assert later.matched == 0
        later.release()
        executor.drain()
        executor.flush()
        manager.audit()

        host.open()
        for _ in range(workers):
            over(ends)
        assert torch.equal(fetch(executor, wanted), stored)
        executor.drain()
        assert all_free(executor)


def test_while_every_worker_hangs_room_is_made_by_dropping():
    manager, (gpu, host) = gated(gpu=6)
    clock = Time()
    executor, ends = patient(manager, (gpu, host), clock)
    with executor:
        for seed in range(6):
            store(executor, prompt(seed, 1), seed)
            clock.now += 10
        host.shut()
        lease = manager.acquire(prompt(99, 1), now=clock())
        executor.poll()
        hang(executor, host)
        executor.wait(lease)  # its room was to come from the block whose store hangs
        lease.commit(prompt(99, 1), now=clock())
        lease.release()
        manager.audit()
        host.open()
        over(ends)
        executor.drain()
        assert all_free(executor)


def test_waiting_for_moves_that_somebody_else_took_is_an_error_in_an_outage_too():
    manager, (gpu, host) = gated(gpu=6)
    clock = Time()
    executor, _ = patient(manager, (gpu, host), clock)
    with executor:
        for seed in range(6):
            store(executor, prompt(seed, 1), seed)
        host.shut()
        first = manager.acquire(prompt(97, 1), now=clock())
        executor.poll()
        hang(executor, host)
        executor.wait(first)
        second = manager.acquire(prompt(98, 4), now=clock())
        taken = manager.moves()
        assert len(taken)
        with pytest.raises(TransferError, match=f"lease {second.id} "):
            executor.wait(second)
        manager.complete(taken.id, now=clock(), ok=False)
        first.release()
        second.release()
        host.open()


def test_one_worker_that_hangs_does_not_stop_the_other():
    manager, (gpu, host) = gated(gpu=8, write="through")
    clock = Time()
    executor, ends = patient(manager, (gpu, host), clock, workers=2)
    wanted = prompt(1, 2)
    with executor:
        stored = away(executor, wanted, 1)
        host.shut()
        store(executor, prompt(2, 1), 2)
        executor.poll()
        hang(executor, host)
        executor.poll()
        assert torch.equal(fetch(executor, wanted), stored)
        executor.drain()
        host.open()
        over(ends)


def test_a_clock_may_start_at_zero():
    manager, (gpu, host) = gated(gpu=3)
    clock = Time()
    clock.now = 0
    executor, _ = patient(manager, (gpu, host), clock)
    with executor:
        store(executor, prompt(1, 3), 1)
        host.shut()
        lease = manager.acquire(prompt(2, 3), now=clock())
        executor.poll()
        assert host.entered.acquire(timeout=30)
        assert executor.runner.ledger.patience() == 2.0
        host.open()
        executor.wait(lease)
        lease.release()


class Gated(Shelf):
    """A storage whose writes wait for a signal before they look at the memory."""

    def __init__(self):
        super().__init__()
        self.entered, self.leave = threading.Semaphore(0), threading.Event()

    def write(self, key, slot, layers, memory, label):
        self.entered.release()
        assert self.leave.wait(30)
        super().write(key, slot, layers, memory, label)


@pytest.mark.parametrize("layer_slots", [False, True])
def test_a_hung_write_does_not_get_the_bytes_of_the_next_holder_of_its_slot(layer_slots):
    tiers = [Tier("gpu", blocks=3, layer_slots=layer_slots), Tier("disk", blocks=12)]
    manager = BlockManager(SHAPE, tiers, block_tokens=SIZE)
    gpu, shelf, clock = Pool(SHAPE, 3, SIZE, layer_slots=layer_slots), Gated(), Time()
    executor, ends = patient(manager, (gpu, shelf), clock)
    with executor:
        store(executor, prompt(1, 3), 1)
        before = gpu.planes[0].clone()
        lease = manager.acquire(prompt(2, 3), now=clock())
        executor.poll()
        hang(executor, shelf, workers=2)  # those of the disk
        executor.wait(lease)
        for where in rows(gpu, lease, 3 * SIZE):
            gpu.scatter(*where, *torch.zeros(2, 3 * SIZE, 2, 4))
        lease.commit(prompt(2, 3), now=clock())
        lease.release()
        assert not gpu.planes[0].any()
        shelf.leave.set()
        for _ in range(2):
            over(ends)
        assert shelf.units
        for unit in shelf.units.values():
            assert (before == unit).all(1).any()
        executor.drain()
        manager.audit()


def test_closing_fails_what_has_not_started_and_waits_for_what_runs():
    manager, (gpu, host) = gated(gpu=3)
    executor = Executor(manager, (gpu, host), workers=1, moves_per_job=1)
    store(executor, prompt(1, 3), 1)
    host.shut()
    lease = manager.acquire(prompt(2, 3), now=executor.clock())
    executor.poll()
    assert host.entered.acquire(timeout=30)
    closer = threading.Thread(target=executor.close)
    closer.start()
    with pytest.raises(TransferError, match="closed"):
        executor.wait(lease)
    host.open()
    closer.join(timeout=30)
    assert not closer.is_alive()
    assert working() == []
    assert any("closed before" in row.reason for row in manager.failed())
    executor.close()
    with pytest.raises(TransferError, match="closed"):
        executor.poll()
    lease.release()
    manager.audit()


def test_closing_does_not_wait_for_a_thread_that_hangs():
    manager, (gpu, host) = gated(gpu=3)
    clock = Time()
    executor, _ = patient(manager, (gpu, host), clock, workers=2)
    store(executor, prompt(1, 3), 1)
    host.shut()
    lease = manager.acquire(prompt(2, 3), now=clock())
    executor.poll()
    hang(executor, host)
    executor.close()
    (left,) = [thread for thread in executor.runner.threads if thread.is_alive()]
    assert lease.ready()
    lease.release()
    host.open()
    left.join(timeout=30)
    assert not left.is_alive()
    manager.audit()
    assert manager.stats().moves == 0


@pytest.mark.parametrize("workers", [0, 1])
def test_a_device_that_hangs_does_not_hold_whoever_waits(workers):
    manager, (gpu, host) = gated(gpu=3)
    clock = Time()
    executor, ends = patient(manager, (gpu, host), clock, workers=workers, deadline_s=0.01)
    with executor:
        store(executor, prompt(1, 3), 1)
        host.shut()
        lease = manager.acquire(prompt(2, 3), now=clock())
        # The wait begins first; then two seconds pass.
        hanging = threading.Thread(target=hang, args=(executor, host))
        hanging.start()
        executor.wait(lease)
        hanging.join()
        lease.release()
        host.open()
        over(ends)
        executor.drain()
        assert all_free(executor)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_thread_outlives_whatever_a_device_raises(workers):
    manager, (gpu, host) = gated(gpu=3)
    with Executor(manager, (gpu, host), workers=workers) as executor:
        store(executor, prompt(1, 3), 1)
        host.error = SystemExit("no more")
        with manager.acquire(prompt(2, 3), now=executor.clock()) as lease:
            executor.wait(lease)
        assert any("SystemExit: no more" in row.reason for row in manager.failed())
        host.error = None
        stored = away(executor, prompt(3, 3), 3)
        assert torch.equal(fetch(executor, prompt(3, 3)), stored)
        assert all_free(executor)
