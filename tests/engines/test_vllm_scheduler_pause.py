"""After a pause or a sleep host and disk match as before, for the weights that they are of."""

import random
from collections import deque

import numpy as np
import pytest
from kept import memory_folder
from tests.engines import vllm_engine
from tests.engines.test_vllm_scheduler_reset import preempt_all
from tests.engines.vllm_engine import PROMPT, SIZE, Engine, PlayedRequest, make_engine

from kvtrie.settings.scope import Scope


@pytest.fixture
def path():
    """A path for a kept file."""
    with memory_folder() as folder:
        yield folder / "pool"


class Weights:
    """Weights of an engine, which its blocks' bytes depend on."""

    def __init__(self, engine, monkeypatch):
        self.engine, self.version = engine, 0
        mark, state = vllm_engine.mark, vllm_engine.state
        monkeypatch.setattr(vllm_engine, "mark", lambda *of: mark(*of) + 300 * self.version)
        monkeypatch.setattr(vllm_engine, "state", lambda *of: state(*of) + 300 * self.version)
        for worker in engine.workers:
            worker._identity.weights = lambda: bytes([self.version] * (self.version > 0))

    def pause(self, version=None):
        """Pause, lose the engine's memory, and go on with these weights or others."""
        preempt_all(self.engine)
        assert self.engine.scheduler.pause()
        self.engine.scheduler.manager.audit()
        stats = self.engine.scheduler.manager.stats()
        assert (stats.leases, self.engine.scheduler.requests.pins.blocks) == (0, 0)
        for memory in self.engine.memory:
            for each in memory.values():
                each.fill_(float("nan"))
        if version is not None:
            self.version = version  # as a trainer in the worker's process, without a call of vLLM

    def scope(self, version):
        """The scope of blocks of a version; that of the current weights must be known."""
        assert self.engine.scheduler.cache.identity.known
        name = self.engine.scheduler.cache.identity.weights
        return Scope(lora=name if version else "")


def found(engine, tokens, scope=None):
    now = engine.scheduler.cache.clock()
    tokens = np.array([*tokens, 1], np.uint32)
    return engine.scheduler.manager.lookup(tokens, now=now, scope=scope).tokens


def priorities(engine, scope, tier=1):
    """The priorities of the prompt's blocks on a tier."""
    manager, now = engine.scheduler.manager, engine.scheduler.cache.clock()
    blocks = manager.lookup(np.array(PROMPT, np.uint32), now=now, scope=scope).handles
    return {manager.explain(block, now=now, tier=tier).priority for block in blocks}


@pytest.mark.grid
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kinds", ["", "ws"])
@pytest.mark.parametrize("deep", [False, True])
def test_random_schedules_with_pauses_and_new_weights_read_nothing_wrong(
    tmp_path, monkeypatch, seed, kinds, deep
):
    draw = random.Random(seed)
    engine = Engine(
        tmp_path if deep else "",
        1 + seed % 2,
        seed // 2 % 2,
        seed,
        host=8,
        kinds=kinds,
        events=True,
    )
    weights = Weights(engine, monkeypatch)
    heads = [[draw.randrange(9) for _ in range(16)] for _ in range(2)]
    for at in range(40):
        tail = [draw.randrange(9) for _ in range(draw.randint(1, 12))]
        engine.add(str(at), draw.choice(heads)[: draw.randint(4, 16)] + tail, draw.randint(1, 9))
        for _ in range(draw.randint(1, 4)):
            engine.step()
        if draw.random() < 0.3:
            preempt_all(engine)
            # As vLLM, which refuses to pause while a request that does not run has blocks.
            if not (engine.loading or any(one.computed for one in engine.waiting)):
                weights.pause(draw.choice([None, None, 0, 1, 2]))
        if draw.random() < 0.05:
            preempt_all(engine)
            assert engine.scheduler.reset()
    engine.drain()
    assert engine.served == 40
    assert engine.found > 0
    assert not engine.failed
    stats = engine.scheduler.manager.stats()
    assert (stats.leases, stats.moves, engine.scheduler.requests.pins.blocks) == (0, 0, 0)
    engine.scheduler.manager.audit()
    engine.close()


def test_a_request_in_flight_at_a_pause_is_stored_with_what_it_computes_again(monkeypatch):
    engine = make_engine(host=16)
    weights = Weights(engine, monkeypatch)
    engine.add("a", PROMPT, 3)
    engine.step()  # computes three blocks, whose commit comes with the next orders
    preempt_all(engine)
    weights.pause()
    engine.drain()
    assert engine.served == 1
    assert found(engine, PROMPT) == 3 * SIZE
    assert len(engine.on_host(PROMPT)) == 3  # with the right bytes
    engine.close()


def test_a_request_that_began_under_other_weights_stores_nothing(monkeypatch):
    engine = make_engine(host=16)
    weights = Weights(engine, monkeypatch)
    engine.add("a", PROMPT, 9)
    engine.step()
    weights.pause(1)
    engine.drain()
    assert engine.served == 1
    assert found(engine, PROMPT, weights.scope(1)) == 0
    engine.add("b", PROMPT, 1)
    engine.drain()
    assert found(engine, PROMPT, weights.scope(1)) == 3 * SIZE
    engine.close()


@pytest.mark.parametrize("keep", [1, 2])
def test_versions_before_the_last_few_are_dropped_and_the_others_leave_first(monkeypatch, keep):
    engine = make_engine(host=16, keep_versions=keep)
    weights = Weights(engine, monkeypatch)
    scopes = []
    for version in range(4):
        weights.pause(version)
        engine.add(str(version), PROMPT, 1)
        engine.drain()
        engine.step()
        scopes.append(weights.scope(version))
    assert [found(engine, PROMPT, scope) > 0 for scope in scopes] == [
        version >= 3 - keep for version in range(4)
    ]
    for version, scope in enumerate(scopes[3 - keep :], 3 - keep):
        assert priorities(engine, scope) == {35 if version == 3 else 0}
    # Back to the oldest that is kept: its blocks count as the current ones.
    weights.pause(3 - keep)
    request = PlayedRequest("again", [*PROMPT, 1], len(PROMPT) + 1, 1)
    assert engine.scheduler.match(request, 0) is None  # until the workers have answered
    engine.step()
    assert engine.scheduler.match(request, 0) == 3 * SIZE
    engine.scheduler.end(request)
    engine.step()
    assert priorities(engine, scopes[3 - keep]) == {35}
    engine.close()


def test_weights_are_not_read_while_vllm_schedules_nothing(monkeypatch):
    """While an engine sleeps its steps go on for copies, and its weights are gone."""
    engine = make_engine(host=16)
    weights = Weights(engine, monkeypatch)
    engine.add("a", PROMPT, 9)
    engine.step()
    weights.pause()
    waiting, engine.waiting = engine.waiting, deque()
    for worker in engine.workers:
        worker._identity.weights = lambda: pytest.fail("the weights are gone")
    engine.step()
    engine.step()
    for worker in engine.workers:
        worker._identity.weights = bytes
    engine.waiting = waiting
    engine.drain()
    assert engine.served == 1
    engine.close()


def serve_versions(engine, monkeypatch, versions):
    """Serve the prompt with each version; its scope by version."""
    weights, scopes = Weights(engine, monkeypatch), {}
    for version in versions:
        weights.pause(version)
        engine.add(str(version), PROMPT, 1)
        engine.drain()
        engine.step()
        scopes[version] = weights.scope(version)
    return weights, scopes


@pytest.mark.parametrize("tier", [1, 2])
def test_the_next_server_has_all_versions_in_kept_memory_or_on_disk(
    tmp_path, path, monkeypatch, tier
):
    where = {"keep": path} if tier == 1 else {"folder": str(tmp_path)}
    engine = make_engine(host=16, **where)
    _, scopes = serve_versions(engine, monkeypatch, [0, 1])
    engine.close()
    monkeypatch.undo()
    again = make_engine(host=16, **where)
    weights = Weights(again, monkeypatch)
    again.step()
    # Their order is not known, so those of other weights leave first.
    assert priorities(again, Scope(), tier) == {35}
    assert priorities(again, scopes[1], tier) == {0}
    weights.pause(1)
    again.add("back", PROMPT, 1)
    again.drain()
    assert again.found == 3 * SIZE
    assert priorities(again, scopes[1], tier) == {35}
    again.close()


def test_a_shared_store_keeps_versions_that_a_server_has_dropped(tmp_path, monkeypatch):
    engine = make_engine(host=16, store=f"folder:{tmp_path}")
    weights, scopes = serve_versions(engine, monkeypatch, [0, 1, 2])
    assert [found(engine, PROMPT, scopes[version]) for version in range(3)] == [0, 12, 12]
    weights.pause(0)
    engine.add("back", PROMPT, 1)
    engine.drain()
    assert engine.found == 3 * SIZE
    engine.close()
