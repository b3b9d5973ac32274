"""Long calls let other threads run Python; short ones keep the interpreter.

The switch interval keeps the interpreter from switching threads by itself, so that another thread
gets on only if a call lets go. No clock is asked: a call that lets go is repeated
until the other thread has come.
"""

from __future__ import annotations

import sys
import sysconfig
import threading

import numpy as np
import pytest

from kvtrie import BlockManager, ModelShape, Prefetch, Tier

NEVER_S = 10_000.0
PROMPT = np.arange(70_000, dtype=np.uint32)
MODEL = ModelShape(layers=2, kv_heads=1, head_dim=8, dtype="float16", fingerprint="lock")

pytestmark = pytest.mark.skipif(
    bool(sysconfig.get_config_var("Py_GIL_DISABLED")), reason="there is no interpreter lock"
)

CALLS = {
    "acquire": lambda m: m.acquire(PROMPT, now=2).release(now=2),
    "lookup_many": lambda m: m.lookup_many([PROMPT] * 20, now=2),
    "hint": lambda m: m.hint([Prefetch(tokens=PROMPT)], now=2),
    "index": lambda m: m.index(now=2),
    "flush": lambda m: m.flush(now=2),
    "snapshot": lambda m: m.snapshot(),
    "audit": lambda m: m.audit(),
}


@pytest.fixture
def manager():
    tiers = [Tier("gpu", blocks=5000, owner="none"), Tier("host", blocks=5000, owner="none")]
    made = BlockManager(MODEL, tiers)
    made.mark(PROMPT, 0, present=True, now=1)
    return made


@pytest.fixture
def other():
    """A thread that waits for a signal to run, and the list in which it says that it did."""
    before, go, said = sys.getswitchinterval(), threading.Event(), []

    def run():
        go.wait()
        said.append("here")

    thread = threading.Thread(target=run)
    thread.start()
    sys.setswitchinterval(NEVER_S)
    yield go, said
    sys.setswitchinterval(before)
    go.set()
    thread.join()


@pytest.mark.parametrize("name", CALLS)
def test_a_long_call_lets_others_run(manager, other, name):
    go, said = other
    go.set()
    for _ in range(10_000):
        CALLS[name](manager)
        if said:
            return
    pytest.fail(f"{name} never let go")


def test_short_calls_keep_the_interpreter(manager, other):
    go, said = other
    go.set()
    for _ in range(1000):
        manager.lookup([1, 2, 3], now=2)
        manager.lookup_many([[1, 2, 3]] * 4, now=2)
        manager.stats()
    assert said == []
