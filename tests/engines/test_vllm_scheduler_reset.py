"""A reset always succeeds: nothing that was kept before it matches, whatever is under way."""

import random

import pytest
from tests.engines import vllm_engine
from tests.engines.vllm_engine import PROMPT, Engine, PlayedRequest, make_engine

from kvtrie.engines.server.commands import read_command


def preempt_all(engine):
    """Preempt all requests, as vLLM does before a reset that includes running requests."""
    while engine.running:
        engine.preempt(engine.running[-1], {})
    while engine.under_way:
        engine.execute()


@pytest.mark.parametrize(("seed", "deep"), [(0, False), (1, True), (2, True), (3, False)])
def test_random_schedules_with_resets_read_nothing_old(tmp_path, monkeypatch, seed, deep):
    draw, weights, plain = random.Random(seed), [0], vllm_engine.mark
    monkeypatch.setattr(vllm_engine, "mark", lambda *block: plain(*block) + 300 * weights[0])
    engine = Engine(tmp_path if deep else "", 1 + seed % 2, seed // 2, seed, host=8, events=True)
    heads = [[draw.randrange(9) for _ in range(16)] for _ in range(2)]
    busy = 0
    for at in range(40):
        tail = [draw.randrange(9) for _ in range(draw.randint(1, 12))]
        engine.add(str(at), draw.choice(heads)[: draw.randint(4, 16)] + tail, draw.randint(1, 9))
        for _ in range(draw.randint(1, 4)):
            engine.step()
        if draw.random() < 0.4:
            if new := draw.random() < 0.5:
                preempt_all(engine)
            else:
                engine.plan()  # a step is under way, so that copies are, however fast they are
            stats = engine.scheduler.manager.stats()
            busy += (stats.moves if deep else stats.leases) > 0
            assert engine.scheduler.reset()
            weights[0] += new  # old bytes are wrong ones from here on
            for head in heads:
                assert not engine.scheduler.match(
                    PlayedRequest(f"probe {at}", [*head, 1], 17, 1), 0
                )
            engine.scheduler.end(PlayedRequest(f"probe {at}", [1], 1, 1))
            engine.scheduler.manager.audit()
    engine.drain()
    assert busy > 2
    assert engine.served == 40
    assert engine.found > 0
    assert not engine.failed
    assert not engine.scheduler.cache.resetting
    stats = engine.scheduler.manager.stats()
    assert (stats.leases, stats.moves, engine.scheduler.requests.pins.blocks) == (0, 0, 0)
    engine.scheduler.manager.audit()
    engine.close()


def test_a_reset_by_command_comes_after_the_loads_of_its_step():
    engine = make_engine(host=16)
    for name in "abc":
        engine.add(name, PROMPT, 1)
        engine.drain()
        if name == "b":  # with the loads of the last request
            engine.scheduler.commands.put(read_command("reset", {}))
    assert (engine.served, engine.found, engine.failed) == (3, 2 * 12, 0)
    assert engine.scheduler.manager.stats().blocks == 0
    assert engine.scheduler.match(PlayedRequest("d", [*PROMPT, 1], len(PROMPT) + 1, 1), 0) == 0
    engine.close()


def test_after_a_reset_that_awaited_copies_the_disk_is_empty(tmp_path):
    engine = Engine(tmp_path, 1, 0, 1, host=8)
    engine.add("a", [1] * 16, 1)
    engine.plan()
    while not engine.scheduler.cache.moves.dispatch.pending:
        engine.execute()
        engine.plan()
    # A step whose orders hold the copies has not run yet, however fast the copies are.
    assert engine.scheduler.reset()
    assert engine.scheduler.cache.resetting
    engine.drain()
    engine.close()
    again = Engine(tmp_path, 1, 0, 1, host=8)
    assert again.scheduler.match(PlayedRequest("b", [1] * 17, 17, 1), 0) == 0
    assert again.scheduler.manager.stats().blocks == 0
    again.close()
