"""Weights that change while a server runs: nothing older is found, nothing mixed is kept."""

import random

import pytest
from tests.engines import vllm_engine
from tests.engines.vllm_engine import PROMPT, SIZE, Engine, PlayedRequest, planned, stores

from kvtrie.engines.vllm.messages import StepNews

pytestmark = pytest.mark.engine


class Server(Engine):
    """An engine whose rows depend on its weights."""

    def __init__(self, monkeypatch, *args, **more):
        self.weights, real = 0, vllm_engine.mark
        marked = lambda *block: (real(*block) + self.weights) % 251 + 1  # noqa: E731
        monkeypatch.setattr(vllm_engine, "mark", marked)
        super().__init__(*args, **more)
        for worker in self.workers:
            worker._identity.weights = lambda: bytes([self.weights])
        self.request_rehash()  # so that the first weights have a name

    def request_rehash(self):
        self.scheduler.cache.identity.request_rehash()

    def update(self, weights):
        """As trainers do: running requests are computed from the beginning."""
        while self.under_way:
            self.execute()
        for request in list(self.running):
            self.preempt(request, {})
        self.weights = weights
        self.request_rehash()


@pytest.mark.parametrize(("ranks", "ahead", "deep"), [(1, 0, False), (1, 1, True), (2, 1, True)])
def test_requests_read_rows_of_the_weights_that_compute(monkeypatch, tmp_path, ranks, ahead, deep):
    draw = random.Random(ranks + ahead)
    folder = tmp_path if deep else ""
    server = Server(monkeypatch, folder, ranks, ahead, 1, clock=None)
    heads = [[draw.randrange(9) for _ in range(12)] for _ in range(2)]
    for at in range(60):
        server.add(
            str(at), [*draw.choice(heads)[: draw.randint(4, 12)], at % 9], draw.randint(1, 5)
        )
        for _ in range(draw.randint(0, 4)):
            server.step()
        if draw.random() < 0.2:
            server.update(draw.choice([0, 1, 2]))
    server.drain()
    assert server.served == 60
    assert server.found > 0
    server.scheduler.manager.audit()
    server.close()


def test_a_call_that_changed_nothing_costs_one_step(monkeypatch):
    server = Server(monkeypatch, "", 1, 0, 0)
    server.add("one", PROMPT, 1)
    server.drain()
    server.request_rehash()
    again = PlayedRequest("again", list(PROMPT), len(PROMPT), 1)
    assert server.scheduler.match(again, 0) is None
    server.add("two", PROMPT, 1)
    server.drain()
    assert server.scheduler.match(again, 0) == 3 * SIZE
    server.update(1)
    assert server.scheduler.match(again, 0) is None
    server.add("three", [1, 2, 3], 1)
    server.drain()
    assert server.scheduler.match(again, 0) == 0
    server.update(0)  # back again
    server.add("four", [3, 2, 1], 1)
    server.drain()
    assert server.scheduler.match(again, 0) == 3 * SIZE
    server.scheduler.end(again)
    server.close()


def changed():
    """A scheduler's half whose worker has other weights since, and vLLM's cache was not reset."""
    scheduler = Engine("", 1, 0, 0).scheduler
    scheduler.cache.identity.request_rehash()
    scheduler.orders(planned({}))
    scheduler.on_reports({0: StepNews(0, b"", (1, b"other"))})
    return scheduler


def test_blocks_computed_from_blocks_of_other_weights_are_not_stored():
    scheduler = changed()
    stale = PlayedRequest("stale", list(PROMPT), len(PROMPT), 1)
    assert scheduler.match(stale, SIZE) == 0
    scheduler.admit(stale, [[1, 2, 3, 4]], 0)  # vLLM found the first block in its own memory
    assert stores(scheduler.orders(planned({"stale": 9}, SIZE))) == (0, 0)
    fresh = PlayedRequest("fresh", list(PROMPT), len(PROMPT), 1)
    assert scheduler.match(fresh, 0) == 0
    scheduler.admit(fresh, [[5, 6, 7, 8]], 0)
    assert stores(scheduler.orders(planned({"fresh": 13}))) == (0, 3)
    # Blocks written with the new weights can be read.
    behind = PlayedRequest("behind", [*PROMPT[: 2 * SIZE], 7, 7, 7, 7, 7], 13, 1)
    scheduler.match(behind, SIZE)
    scheduler.admit(behind, [[5, 9, 10, 11]], 0)
    assert sum(stores(scheduler.orders(planned({"behind": 9}, SIZE)))) > 0


def test_requests_that_run_through_a_change_keep_nothing_more():
    scheduler = Engine("", 1, 0, 0).scheduler
    one = PlayedRequest("one", list(PROMPT), len(PROMPT), 1)
    scheduler.match(one, 0)
    scheduler.admit(one, [[1, 2, 3, 4]], 0)
    scheduler.cache.identity.request_rehash()
    assert stores(scheduler.orders(planned({"one": 13}))) == (0, 0)  # its weights are not known yet
    scheduler.on_reports({0: StepNews(0, b"", (1, b"other"))})
    assert stores(scheduler.orders(planned({}))) == (0, 0)
    scheduler.end(one)
    scheduler.orders(planned({}))
    assert scheduler.manager.stats().leases == 0
    scheduler.manager.audit()


def test_requests_that_run_through_a_call_that_changed_nothing_are_stored():
    scheduler = Engine("", 1, 0, 0).scheduler
    one = PlayedRequest("one", list(PROMPT), len(PROMPT), 1)
    scheduler.match(one, 0)
    scheduler.admit(one, [[1, 2, 3, 4]], 0)
    scheduler.cache.identity.request_rehash()
    assert stores(scheduler.orders(planned({"one": 13}))) == (0, 0)
    scheduler.on_reports({0: StepNews(0, b"", (1, b""))})
    assert stores(scheduler.orders(planned({}))) == (3, 0)


def test_a_dropped_window_is_no_block_of_other_weights():
    engine = vllm_engine.make_engine(24, kinds="w")
    scheduler, request = engine.scheduler, PlayedRequest("one", list(range(13)), 13, 1)
    identity = scheduler.cache.identity
    identity._change(None)
    identity.written(range(1, engine.blocks.count))  # requests of the new weights
    scheduler.match(request, 8)
    scheduler.admit(request, [[1, 2, 3, 4], [0, 5, 6, 7]], 0)
    assert "one" in scheduler.requests.running
    scheduler.end(request)
    engine.drain()
    engine.close()
