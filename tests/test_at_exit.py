"""A process ends with its own status, whatever its threads are amid of."""

import subprocess
import sys

import pytest

PARTS = """
import sys, threading
import numpy as np
import torch
from kvtrie import BlockManager, ModelShape, Tier
from kvtrie.tiers import host_pool
from kvtrie.transfer import Runner
from kvtrie.transfer.deadline_call import DeadlineCall
from kvtrie.transfer.stream import Stream

begun, ended = threading.Event(), threading.Event()
ns = 0

def native(over):
    "Be in a native call, which lets go of the interpreter's lock, until something has ended."
    begun.set()
    rows = torch.ones(700, 700)
    while not over():
        rows = rows @ rows * 0

class Storage:
    def write(self, *_, **__):
        native(lambda: runner.ledger.closed)

def store():
    shape = ModelShape(layers=1, kv_heads=1, head_dim=16, dtype="float32")
    tiers = [Tier("gpu", blocks=4, write="through"), Tier("host", blocks=4)]
    manager, text = BlockManager(shape, tiers, block_tokens=4), np.arange(4, dtype=np.uint32)
    manager.acquire(text, now=1).commit(text, now=1)
    deadline = 1.0 if sys.argv[1:] else None
    pools = [host_pool(shape, Tier("host", blocks=4), 4), Storage()]
    made = Runner(pools, deadline_s=deadline, clock=lambda: ns)
    made.submit(manager.moves())
    return made
"""


def ended(code, *words):
    done = subprocess.run(
        [sys.executable, "-c", PARTS + code, *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("late", [(), ("late",)])
def test_a_move_that_is_under_way_does_not_abort_the_process(late):
    code = """
runner = store()
assert begun.wait(60)
if sys.argv[1:]:
    ns = 2_000_000_000
    assert runner.reports(wait=True)
sys.exit(3)
"""
    status, said = ended(code, *late)
    assert (status, "terminate called" in said) == (3, False)


def test_a_call_of_a_stream_does_not_abort_the_process():
    code = """
stream = Stream("copies", torch.device("cpu"))
stream.submit(lambda: native(lambda: stream._closed))
assert begun.wait(60)
"""
    assert ended(code) == (0, "")


def test_a_call_that_hangs_delays_the_end_by_a_few_seconds_only():
    code = """
import kvtrie.at_exit as module
module._PATIENCE_S = 0.1
DeadlineCall(lambda: (begun.set(), ended.wait(1000)), lambda: 0)
assert begun.wait(60)
sys.exit(3)
"""
    assert ended(code) == (3, "")
