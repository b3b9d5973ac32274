"""Questions to a shared store end by their deadlines, whatever the store does."""

import threading
import time

import numpy as np
import pytest

from kvtrie.tiers.remote import Found
from kvtrie.transfer.store_question import Question, Questions

KEYS = np.zeros((2, 32), np.uint8)
MS = 1_000_000


class Store:
    """A store whose answers wait until a test lets them go."""

    def __init__(self):
        self.asked, self.released = threading.Semaphore(0), threading.Event()
        self.calls = []

    def find(self, keys, deadline):  # noqa: ARG002
        self.calls.append(len(keys))
        self.asked.release()
        self.released.wait(60)
        return Found(len(keys), len(keys), 0, 0)


def ask(questions, deadline, now=0):
    question = Question(np.zeros(8, np.uint32), None, 0, KEYS, deadline)
    questions.ask(question, now)
    return question


def ended(question):
    """Wait for the end of a question, however late it is."""
    question._over.acquire(timeout=60)
    return question.closed


def test_no_question_waits_for_calls_that_hang():
    now, store = [0], Store()
    questions = Questions(store.find, lambda: now[0])
    asked = [ask(questions, 50 * MS) for _ in range(5)]
    for _ in range(4):
        assert store.asked.acquire(timeout=60)
    now[0] = 50 * MS
    refused = ask(questions, 100 * MS, now[0])
    assert (refused.refused, refused.wait(lambda: now[0])) == (True, None)
    store.released.set()
    assert all(ended(question) for question in asked)
    assert [each.found is None for each in asked] == [False] * 4 + [True]
    assert store.calls == [2] * 4  # the fifth was late before a thread came to it
    later = ask(questions, 10**15, now[0])
    assert later.wait(lambda: now[0]).blocks == 2
    questions.close()


def test_a_wait_ends_at_the_deadline():
    store = Store()
    questions = Questions(store.find, time.monotonic_ns)
    question = ask(questions, time.monotonic_ns() + 5 * MS)
    assert question.wait(time.monotonic_ns) is None
    store.released.set()
    assert ended(question)
    questions.close()


def test_an_error_of_the_store_is_raised_where_its_answer_is_awaited():
    def fail(_keys, _deadline):
        raise OSError("the store is gone")

    questions = Questions(fail, lambda: 0)
    for _ in range(2):  # the thread goes on
        with pytest.raises(OSError, match="gone"):
            ask(questions, 1000 * MS).wait(lambda: 0)
    questions.close()


def test_threads_end_when_nothing_is_asked(monkeypatch):
    monkeypatch.setattr("kvtrie.transfer.store_question._IDLE_S", 0.001)
    store = Store()
    store.released.set()
    questions = Questions(store.find, time.monotonic_ns)
    for _ in range(50):
        first = ask(questions, time.monotonic_ns() + 60_000 * MS)
        assert first.wait(time.monotonic_ns).blocks == 2
        for thread in list(questions._threads):
            thread.join(60)
        assert not questions._threads
