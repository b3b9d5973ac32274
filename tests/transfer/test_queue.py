"""The queue: every job leaves once, the most urgent first, and nothing waits for what is gone."""

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtrie.transfer.job import Job, Urgency
from kvtrie.transfer.queue import Queue

DEMAND, PREFETCH, BACKGROUND = Urgency


def job(*ids, urgency=BACKGROUND, after=0, place=None):
    return Job(
        None,
        None,
        ids=np.array(ids, dtype=np.uint64),
        urgency=urgency,
        after=after,
        place=place,
        slots=np.array([(ident, -ident) for ident in ids]),
        keys=[b"key %d" % ident for ident in ids],
        labels=[b"label %d" % ident for ident in ids],
    )


def queue(*jobs):
    made = Queue()
    for each in jobs:
        made.add(each)
    return made


def order(given):
    """The ids of all jobs that leave when nothing is added, in turn."""
    return [each.ids.tolist() for each in iter(given.pop, None)]


def test_the_urgent_leave_first_and_equals_in_the_order_of_arrival():
    given = queue(
        job(1),
        job(2, urgency=PREFETCH),
        job(3, urgency=DEMAND),
        job(4),
        job(5, urgency=DEMAND),
        job(6, urgency=PREFETCH),
    )
    assert [each.ids.tolist() for each in given] == [[3], [5], [2], [6], [1], [4]]
    assert len(given) == 6
    assert order(given) == [[3], [5], [2], [6], [1], [4]]
    assert len(given) == 0


def test_a_job_that_waits_starts_when_its_move_has_ended_well():
    given = queue(job(1, 2), job(3, urgency=DEMAND, after=2))
    first = given.pop()
    assert first.ids.tolist() == [1, 2]
    assert given.pop() is None
    assert given.ended(1, ok=True) == []
    assert given.pop() is None
    assert given.ended(2, ok=True) == []
    assert order(given) == [[3]]


def test_a_store_that_a_load_waits_for_overtakes_a_prefetch():
    given = queue(
        job(1),
        job(2, urgency=PREFETCH),
        job(3),
        job(4, urgency=DEMAND, after=3),
        job(5, urgency=PREFETCH, after=1),
    )
    assert order(given) == [[3], [2], [1]]


def test_urgency_goes_down_a_whole_chain():
    given = queue(job(1), job(2, after=1), job(3, after=2), job(9, urgency=PREFETCH))
    given.add(job(4, urgency=DEMAND, after=3))
    for ident in (1, 2, 3, 4):
        assert given.pop().ids.tolist() == [ident]
        assert given.ended(ident, ok=True) == []
    assert order(given) == [[9]]


def test_what_waits_for_a_failed_move_leaves_with_it():
    given = queue(job(1), job(2, after=1), job(3, 4, after=2), job(5, after=4), job(6))
    assert given.pop().ids.tolist() == [1]
    assert sorted(given.ended(1, ok=False)) == [2, 3, 4, 5]
    assert len(given) == 1
    assert order(given) == [[6]]


def test_a_long_chain_fails_at_once():
    given = queue(job(1), *(job(ident, after=ident - 1) for ident in range(2, 5000)))
    assert given.pop().ids.tolist() == [1]
    assert len(given.ended(1, ok=False)) == 4998
    assert len(given) == 0


def test_cancelling_cuts_a_job_and_leaves_it_in_its_place():
    first = job(1, 2, 3)
    given = queue(first, job(4))
    assert given.cancel([2, 77]) == ([2], [])
    assert (first.ids.tolist(), first.slots.tolist()) == ([1, 3], [[1, -1], [3, -3]])
    assert (first.keys, first.labels) == ([b"key 1", b"key 3"], [b"label 1", b"label 3"])
    assert given.cancel([1]) == ([1], [])
    assert order(given) == [[3], [4]]


def test_cancelling_returns_the_moves_that_leave_with_others():
    given = queue(job(1, 2), job(3, after=1), job(4, after=3), job(5, 6, after=2))
    cancelled, with_them = given.cancel([4, 5, 1, 1])
    assert (sorted(cancelled), with_them) == ([1, 4, 5], [3])
    assert len(given) == 2
    assert given.pop().ids.tolist() == [2]
    assert given.ended(2, ok=True) == []
    assert order(given) == [[6]]


@pytest.mark.parametrize("ids", [None, [3, 2, 1], [1, 2, 3]])
def test_a_cancelled_move_is_not_counted_twice(ids):
    given = queue(job(1), job(2, after=1), job(3, after=2))
    cancelled, with_them = given.cancel(ids)
    assert sorted(cancelled + with_them) == [1, 2, 3]
    assert len(given) == 0
    assert given.pop() is None


def test_jobs_at_one_place_run_one_at_a_time_in_their_order():
    one, other = (2, 7), (2, 8)
    given = queue(
        job(1, place=one), job(2, place=other), job(3, place=one), job(4), job(5, place=one)
    )
    assert [each.ids.tolist() for each in given] == [[1], [2], [4]]
    assert len(given) == 5
    first = given.pop()
    assert given.blocked_by(first) == [3, 5]
    assert order(given) == [[2], [4]]
    given.done(first)
    second = given.pop()
    assert second.ids.tolist() == [3]
    assert given.pop() is None
    assert given.cancel([5]) == ([5], [])
    given.done(second)
    assert len(given) == 0


def test_a_job_gets_the_urgency_of_jobs_waiting_for_its_place():
    given = queue(job(1), job(2, place=(2, 7)), job(3, place=(2, 7), urgency=DEMAND), job(4))
    first = given.pop()
    assert first.ids.tolist() == [2]
    given.done(first)
    assert order(given) == [[3], [1], [4]]


def test_a_job_gives_its_place_up_when_it_is_cancelled():
    given = queue(
        job(1, place=(2, 7)), job(2, place=(2, 7)), job(3, place=(2, 7)), job(4, place=(2, 7))
    )
    assert given.cancel([1, 3]) == ([1, 3], [])
    first = given.pop()
    assert first.ids.tolist() == [2]
    given.done(first)
    assert order(given) == [[4]]


class Wanted:
    """A job in the model."""

    def __init__(self, ids, urgency, after, place):
        self.ids, self.urgency, self.after, self.place = ids, urgency, after, place
        self.turn = None


class Model:
    """Model of the queue: jobs in a list, sorted at every call."""

    def __init__(self):
        self.jobs = []  # those that wait for nothing in the order in which they came to that
        self.running = []
        self.turns = 0

    def who(self, ident):
        return next((each for each in self.jobs if ident in each.ids), None)

    def line(self, place):
        return [each for each in self.jobs if not each.after and each.place == place]

    def first(self, each):
        """Whether a job is the first at its place."""
        return each.place is None or (
            self.line(each.place)[0] is each
            and all(other.place != each.place for other in self.running)
        )

    def assign_turns(self):
        """Give each job that could start a turn, and a new one if a more urgent job is after it."""
        for each in self.jobs:
            if each.after or not self.first(each):
                continue
            line = [each] if each.place is None else self.line(each.place)
            urgency = min(other.urgency for other in line)
            if each.turn is None or urgency < each.urgency:
                self.turns += 1
                each.turn, each.urgency = self.turns, urgency

    def add(self, ids, urgency, after, place):
        self.jobs.append(Wanted(ids, urgency, after, place))
        for waiting in reversed(self.jobs):
            other = self.who(waiting.after)
            while other is not None and other.urgency > waiting.urgency:
                other.urgency = waiting.urgency
                if other.turn is not None:
                    self.turns += 1
                    other.turn = self.turns
                other = self.who(other.after)
        self.assign_turns()

    def ready(self):
        free = [each for each in self.jobs if not each.after and self.first(each)]
        return sorted(free, key=lambda each: (each.urgency, each.turn))

    def pop(self, each):
        self.jobs.remove(each)
        self.running.append(each)

    def done(self, each):
        self.running.remove(each)
        self.assign_turns()

    def ended(self, ident, ok):
        lost = []
        for each in [each for each in self.jobs if each.after == ident]:
            self.jobs.remove(each)
            if ok:
                each.after = 0
                self.jobs.append(each)
                self.assign_turns()
            else:
                lost += each.ids
                for child in each.ids:
                    lost += self.ended(child, ok=False)
        return lost

    def cancel(self, ids):
        lost = []
        for ident in ids:
            each = self.who(ident)
            if each is None:
                continue
            each.ids.remove(ident)
            if not each.ids:
                self.jobs.remove(each)
                self.assign_turns()
            lost += [ident, *self.ended(ident, ok=False)]
        return lost


class Machine(RuleBasedStateMachine):
    """The queue and its model in step, used as an executor does."""

    def __init__(self):
        super().__init__()
        self.queue = Queue()
        self.model = Model()
        self.made = 0
        self.running = []  # pairs of what runs here and in the model
        self.left = []

    def leave(self, ids):
        assert not set(ids) & set(self.left)
        self.left += ids

    @rule(
        urgency=st.sampled_from(Urgency),
        moves=st.integers(1, 4),
        pick=st.integers(0, 99),
        place=st.sampled_from([None, None, (2, 1), (2, 2)]),
    )
    def add(self, urgency, moves, pick, place):
        queued = [ident for each in self.model.jobs for ident in each.ids]
        queued += [ident for _, each in self.running for ident in each.ids]
        choices = [0] * (len(queued) + 1) + queued
        after = choices[pick % len(choices)]
        ids = list(range(self.made + 1, self.made + 1 + moves))
        self.made += moves
        self.queue.add(job(*ids, urgency=urgency, after=after, place=place))
        self.model.add(ids, urgency, after, place)

    @rule()
    def pop(self):
        ready = self.model.ready()
        popped = self.queue.pop()
        assert (popped is None) == (not ready)
        if popped is not None:
            self.model.pop(ready[0])
            assert (popped.ids.tolist(), popped.after) == (ready[0].ids, 0)
            self.leave(popped.ids.tolist())
            self.running.append((popped, ready[0]))

    @rule(pick=st.integers(0, 99), ok=st.booleans())
    @precondition(lambda self: self.running)
    def end(self, pick, ok):
        ended, wanted = self.running.pop(pick % len(self.running))
        if ended.place is not None:
            line = self.model.line(ended.place)
            assert self.queue.blocked_by(ended) == [ident for each in line for ident in each.ids]
        self.queue.done(ended)
        self.model.done(wanted)
        for ident in ended.ids.tolist():
            lost = self.queue.ended(ident, ok=ok)
            assert sorted(lost) == sorted(self.model.ended(ident, ok))
            assert not (ok and lost)
            self.leave(lost)

    @rule(picks=st.lists(st.integers(1, 60), max_size=6))
    def cancel(self, picks):
        cancelled, with_them = self.queue.cancel(picks)
        assert set(cancelled) <= set(picks)
        assert not set(with_them) & set(cancelled)
        lost = self.model.cancel(picks)
        assert sorted(cancelled + with_them) == sorted(lost)
        self.leave(lost)

    @rule()
    @precondition(lambda self: self.made % 5 == 0)
    def cancel_all(self):
        cancelled, with_them = self.queue.cancel()
        gone = [ident for each in self.model.jobs for ident in each.ids]
        assert sorted(cancelled + with_them) == sorted(gone)
        self.leave(gone)
        self.model.jobs.clear()

    @invariant()
    def in_step(self):
        assert [each.ids.tolist() for each in self.queue] == [
            each.ids for each in self.model.ready()
        ]
        assert len(self.queue) == sum(len(each.ids) for each in self.model.jobs)
        for each in self.queue:
            assert each.slots.tolist() == [[ident, -ident] for ident in each.ids.tolist()]
        assert len(self.left) + len(self.queue) == self.made

    def teardown(self):
        """Whatever is left can be carried out to its end."""
        while self.running or len(self.queue):
            while self.running:
                ended, _ = self.running.pop()
                self.queue.done(ended)
                for ident in ended.ids.tolist():
                    assert self.queue.ended(ident, ok=True) == []
            popped = self.queue.pop()
            assert popped is not None or not len(self.queue)
            if popped is not None:
                self.leave(popped.ids.tolist())
                self.running.append((popped, None))
        assert len(self.left) == self.made


TestMachine = Machine.TestCase


def test_jobs_of_a_storage_have_a_separate_order():
    queue = Queue(split=True)
    jobs = [job(1), job(2, place=(1, 0)), job(3, place=(2, 0)), job(4, place=(1, 5), after=1)]
    for one in jobs:
        queue.add(one)
    assert queue.pop(storage=1) is jobs[1]
    assert queue.pop(storage=1) is None
    assert [one.ids.tolist() for one in queue.of_storage(1)] == [[4]]
    assert queue.pop(storage=2) is jobs[2]
    assert queue.pop() is jobs[0]
    assert queue.ended(1, ok=True) == []
    assert queue.pop() is None
    assert queue.pop(storage=1) is jobs[3]
