"""Blocks of adapters, from the scheduler's question to the worker's copies."""

from types import SimpleNamespace

import pytest
from tests.engines.vllm_engine import PROMPT, make_engine


class Held:
    """Adapters of a worker whose tensors are those of `files` when they are loaded."""

    def __init__(self, files):
        self.files, self.held, self.loads = files, {}, 0

    def digests(self):
        return dict(self.held)

    def forget(self):
        pass

    def load(self, request):
        self.loads += 1
        self.held[request.lora_int_id] = self.files[request.lora_int_id]


@pytest.fixture
def engine():
    one = make_engine(ranks=2)
    one.files = {1: b"x"}
    for worker in one.workers:
        worker._identity.adapters = Held(one.files)
    yield one
    one.close()


def serve(one, name):
    """Answer a request of adapter 1; the tokens that were found."""
    one.add(name, PROMPT, 0)
    one.seen[-1].lora_request = SimpleNamespace(lora_name="mine", lora_int_id=1, load_inplace=False)
    before = one.found
    one.whole = True
    for _ in range(20):
        if not one.waiting and not one.running:
            break
        one.plan()
        one.execute()
    one.drain()
    return one.found - before


def test_blocks_of_an_adapter_are_found_until_it_is_another(engine):
    assert serve(engine, "first") == 0
    assert serve(engine, "second") == 12
    assert [worker._identity.adapters.loads for worker in engine.workers] == [1, 1]
    for worker in engine.workers:  # evicted, and its files have changed
        worker._identity.adapters.held.clear()
    engine.files[1] = b"y"
    engine.add("other", PROMPT, 0)  # of no adapter: a step that reports what is held
    engine.plan()
    engine.execute()
    engine.drain()
    assert serve(engine, "third") == 0
    assert serve(engine, "fourth") == 12
    assert engine.failed == 0


def test_adapter_that_cannot_be_loaded_is_served_without_blocks(engine):
    engine.files[1] = b""
    assert serve(engine, "first") == 0
    assert serve(engine, "second") == 0
    assert engine.served == 2


def test_load_is_refused_if_the_step_has_read_another_adapter(engine):
    assert serve(engine, "first") == 0
    engine.add("second", PROMPT, 0)
    engine.seen[-1].lora_request = SimpleNamespace(
        lora_name="mine", lora_int_id=1, load_inplace=False
    )
    engine.plan()
    for worker in engine.workers:
        worker._identity.adapters.held[1] = b"y"
    engine.execute()
    assert [request.request_id for request in engine.broken] == ["second"]
    engine.drain()
    assert serve(engine, "third") == 0


def test_request_that_waits_for_loads_of_another_adapter_is_computed():
    engine = make_engine(kinds="w")
    (worker,) = engine.workers
    worker._identity.adapters = Held({1: b"x"})
    assert serve(engine, "first") == 0
    before = engine.found
    engine.add("second", PROMPT, 0)
    engine.seen[-1].lora_request = SimpleNamespace(
        lora_name="mine", lora_int_id=1, load_inplace=False
    )
    engine.plan()
    assert engine.loading
    worker._identity.adapters.held[1] = b"y"
    engine.execute()
    engine.drain()
    assert (engine.late, engine.found, engine.served) == (1, before, 2)
    engine.close()
