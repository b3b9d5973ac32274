"""A ledger without threads: each move is reported once, and again if it ends past its deadline."""

import threading

import pytest
from rig import SHAPE, SIZE, Time, prompt, world

from kvtrie.errors import TransferError
from kvtrie.tiers import Pool
from kvtrie.transfer.ledger import Ledger
from kvtrie.transfer.outbox import Outbox

SECOND = 1_000_000_000


@pytest.fixture
def moves():
    """Three stores."""
    manager, _ = world(gpu=3, host=12)
    with manager.acquire(prompt(1, 3), now=1) as lease:
        lease.commit(prompt(1, 3), now=1)
    manager.acquire(prompt(2, 3), now=2).release()
    return manager.moves()


def make_ledger(*, deadline_ns=None):
    """A ledger whose only worker is this thread, and its outbox."""
    clock, pools = Time(), [Pool(SHAPE, 3, SIZE), Pool(SHAPE, 12, SIZE)]
    outbox = Outbox(pools, (), clock, sink=None, callback=None, threads=())
    ledger = Ledger(
        pools,
        (),
        {None: [threading.current_thread()]},
        outbox,
        inline=False,
        deadline_ns=deadline_ns,
        clock=clock,
        moves_per_job=1,
        compute=None,
    )
    return ledger, outbox, clock


def begin(ledger):
    """Begin one job as a worker does."""
    with ledger.section:
        (job,) = ledger.begin(threading.current_thread(), None)
    return job


def test_each_move_is_reported_once(moves):
    ledger, outbox, _ = make_ledger()
    ledger.submit(moves)
    assert ledger.pending == 3
    ledger.end(begin(ledger))
    ledger.end(begin(ledger), "no room")
    assert ledger.cancel(None, "cancelled") == 1
    found = [(one.ids, one.error, one.cancelled) for one in outbox.take()]
    first, second, third = moves.id.tolist()
    assert found == [
        ((first,), None, False),
        ((second,), "no room", False),
        ((third,), "cancelled", True),
    ]
    assert ledger.pending == 0


def test_a_late_job_fails_what_waits_for_its_worker_and_is_reported_again_at_its_end(moves):
    ledger, outbox, clock = make_ledger(deadline_ns=SECOND)
    ledger.submit(moves)
    job = begin(ledger)
    clock.now += SECOND
    with ledger.section:
        assert ledger.poll()
        assert not ledger.poll()
    late, gone = outbox.take()
    assert (late.ids, late.hung) == (tuple(job.ids.tolist()), True)
    assert (gone.error, gone.cancelled, len(gone.ids)) == ("every worker hangs", True, 2)
    assert ledger.hangs
    assert ledger.await_running() == {threading.current_thread()}
    ledger.end(job)
    (end,) = outbox.take()
    assert (end.ids, end.error) == (late.ids, "the move ended past its deadline")
    assert ledger.await_running() == set()


def test_a_move_may_not_wait_for_a_failed_one(moves):
    ledger, outbox, _ = make_ledger()
    ledger.submit(moves[:1])
    ledger.end(begin(ledger), "no room")
    outbox.take()
    after = moves[1:2]
    after.after[:] = moves.id[0]
    ledger.submit(after)
    (gone,) = outbox.take()
    assert (gone.error, gone.cancelled) == ("the move that it waits for has failed", True)
    assert ledger.pending == 0


def test_abandoned_moves_are_cancelled_whether_they_run_or_wait(moves):
    ledger, outbox, _ = make_ledger()
    ledger.submit(moves)
    begin(ledger)
    ledger.abandon("dropped")
    found = outbox.take()
    assert {(one.error, one.cancelled) for one in found} == {("dropped", True)}
    assert sorted(ident for one in found for ident in one.ids) == sorted(moves.id.tolist())
    with pytest.raises(TransferError, match="closed"):
        ledger.submit(moves)
