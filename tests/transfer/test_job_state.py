"""The states of a job: every transition that its life may take, and no other."""

from itertools import product

import pytest
from rig import SHAPE, SIZE, Gate, Time, prompt, store, world

from kvtrie.errors import InvariantError
from kvtrie.tiers import Pool
from kvtrie.transfer import Executor, Runner
from kvtrie.transfer.job import Job
from kvtrie.transfer.job_state import JobState

WAITING, LOST, IDLE, COPYING, LATE, ENDED, EXPIRED = JobState
ALLOWED = {
    (WAITING, LOST),  # cancelled, or its first failed
    (WAITING, IDLE),  # begun by the engine that has claimed it
    (WAITING, COPYING),  # taken by a thread
    (IDLE, COPYING),  # a layer begins
    (IDLE, ENDED),
    (COPYING, IDLE),  # a layer is there
    (COPYING, LATE),
    (COPYING, ENDED),
    (LATE, EXPIRED),
}


@pytest.mark.parametrize(("before", "after"), list(product(JobState, JobState)))
def test_a_job_goes_only_where_it_may(before, after):
    pool = Pool(SHAPE, 1, SIZE)
    job = Job(pool, pool, state=before)
    if (before, after) in ALLOWED:
        job.go(after)
        assert job.state is after
        return
    with pytest.raises(InvariantError, match=f"from {before.value} to {after.value}$"):
        job.go(after)
    assert job.state is before


def test_of_a_state_follows_whether_it_has_begun_expired_and_ended():
    pool = Pool(SHAPE, 1, SIZE)
    jobs = {state: Job(pool, pool, state=state) for state in JobState}
    assert {state for state in JobState if not jobs[state].begun} == {WAITING, LOST}
    assert {state for state in JobState if jobs[state].expired} == {LATE, EXPIRED}
    assert {state for state in JobState if jobs[state].over} == {ENDED, EXPIRED}


@pytest.fixture
def passed(monkeypatch):
    """The transitions of all jobs of a test, in order."""
    seen, go = [], Job.go

    def noted(job, state):
        seen.append((job.state, state))
        go(job, state)

    monkeypatch.setattr(Job, "go", noted)
    return seen


def test_a_job_of_a_thread_copies_and_ends_or_expires(passed):
    manager, pools = world(gpu=3)
    with manager.acquire(prompt(1, 3), now=1) as lease:
        lease.commit(prompt(1, 3), now=1)
    manager.acquire(prompt(2, 3), now=2).release()
    moves, clock = manager.moves(), Time()
    with Runner(pools, workers=0) as runner:
        runner.submit(moves[:1])
        runner.drain()
    assert passed == [(WAITING, COPYING), (COPYING, ENDED)]
    passed.clear()
    host = Gate(SHAPE, 12, SIZE)
    with Runner([pools[0], host], workers=1, moves_per_job=1, deadline_s=1, clock=clock) as runner:
        runner.submit(moves[1:])
        assert host.entered.acquire(timeout=30)
        clock.now += 10**9
        runner.drain()
        (thread,) = runner.threads
        host.open()
    thread.join(timeout=30)
    assert passed == [(WAITING, COPYING), (COPYING, LATE), (WAITING, LOST), (LATE, EXPIRED)]


def test_a_claimed_job_is_idle_between_its_layers(passed):
    manager, pools = world(gpu=3, host=12, write="through")
    with Executor(manager, pools, workers=0) as executor:
        for seed in (1, 2):
            store(executor, prompt(seed, 3), seed)
            executor.drain()
        claims = executor.claims
        lease = claims.acquire(
            lambda: manager.acquire(prompt(1, 3), now=executor.clock(), keep=0, load="all")
        )
        (job,) = claims.claim(lease.id)
        passed.clear()
        assert claims.begin(job)
        for layer in range(2):
            claims.copying(job)
            claims.copied(job, 1, layer + 1)
        claims.end(job, "given up", cancelled=True)
        lease.release()
    turn = [(IDLE, COPYING), (COPYING, IDLE)]
    assert passed == [(WAITING, IDLE), *turn, *turn, (IDLE, ENDED)]
