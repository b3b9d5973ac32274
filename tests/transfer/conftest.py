"""No test leaves a thread to the next one: what a hung copy kept busy ends with its test."""

import threading

import pytest
import rig


@pytest.fixture(autouse=True)
def _threads_end_with_their_test():
    before = rig.EARLIER = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=60)
        assert not thread.is_alive(), thread.name
