"""Whatever fails below the executor: every request ends, and nothing wrong is ever read."""

import random
from collections import Counter

import pytest
from faulty import FAULTS, KINDS, NONE
from hypothesis import given, settings
from hypothesis import strategies as st
from kept import memory_folder
from verifying_engine import CHATS, WORLDS, Engine, Request, World

from kvtrie.tiers import DiskStorage
from kvtrie.tiers.kept import KeptPool

pytestmark = pytest.mark.timeout(120)  # a stuck engine fails, it does not stop the suite

REQUESTS = st.builds(
    Request,
    chat=st.integers(0, CHATS - 1),
    cut=st.integers(0, 16),
    fresh=st.integers(1, 6),
    answer=st.integers(0, 3),
)
FORMS = [
    ("leaf-only", (False, False)),
    ("leaf-only", (True, False)),
    ("holes", (False, False)),
    ("holes", (True, False)),
    ("holes", (True, True)),
    ("leaf-only", (True, True)),
]
SHAPES = st.builds(
    lambda form, **settings: World(*form, **settings),
    form=st.sampled_from(FORMS),
    rooms=st.tuples(st.integers(6, 12), st.integers(3, 6), st.integers(4, 40)),
    write=st.sampled_from(["back", "back", "through"]),
    free_low=st.sampled_from([0.0, 0.25]),
    load=st.sampled_from(["all", "all", "plan"]),
    workers=st.integers(0, 2),
    step=st.sampled_from([1, 8]),
)


@pytest.fixture
def memory():
    with memory_folder() as folder:
        yield folder


@settings(max_examples=60)
@given(
    world=SHAPES,
    batches=st.lists(st.lists(REQUESTS, min_size=1, max_size=2), max_size=25),
    script=st.lists(st.sampled_from([None, None, None, *FAULTS]), max_size=80),
    pause=st.integers(1, 8),
)
def test_answers_are_right_whatever_fails(world, batches, script, pause):
    """The script says what happens to each operation of a device, in turn; then all is well."""
    faults = iter(script)
    engine = Engine(world, lambda _: next(faults, None))
    try:
        for number, batch in enumerate(batches):
            engine.serve(batch)
            assert engine.wrong == []
            if number % pause == 0:
                engine.drain_without_faults()
    finally:
        engine.faults.release()
    engine.close()
    assert engine.wrong == []
    assert engine.results.requests == sum(map(len, batches))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_each_kind_of_fault_leads_to_recomputation(kind, tmp_path, memory):
    injected, restored = Counter(), 0
    for seed, world in enumerate(WORLDS):
        folder = tmp_path / str(seed) if kind.files else None
        keep = memory / str(seed) if kind.keep else None
        engine, draw = Engine(world, kind.plan(seed), folder, keep), random.Random(seed)
        for number in range(24):
            if kind.keep and number and number % 8 == 0:
                engine = engine.successor()
            engine.serve(Request.batch(draw))
            assert engine.wrong == []
            if draw.random() < 0.5:
                engine.drain_without_faults()
        engine.close()
        assert engine.wrong == []
        restored += engine.results.restored  # in one world all copies to the host may have failed
        injected += engine.faults.injected
    assert restored > 0 or not kind.keep
    assert {fault for _, fault in injected} >= set(kind.faults)
    assert {operation for operation, _ in injected} >= set(kind.operations)


def served(world, folder=None, seed=1, requests=40):
    """An engine that has answered without faults, with nothing left to move."""
    engine, draw = Engine(world, NONE.plan(0), folder), random.Random(seed)
    while engine.results.requests < requests:
        engine.serve(Request.batch(draw))
    engine.drain_without_faults()
    return engine


def first_wrong(engine, seed=2):
    """Let an engine answer until something is wrong."""
    draw = random.Random(seed)
    while not engine.wrong:
        engine.serve(Request.batch(draw))
    engine.abandon()
    return engine.wrong


def test_the_conversations_reuse_what_every_tier_holds():
    hits = Counter()
    for world in WORLDS:
        engine = served(world)
        for tier, counted in engine.manager.stats().tiers.items():
            hits[tier] += counted.hits
        assert engine.results.reused > 0.3 * engine.results.computed
        assert engine.wrong == []
        engine.close()
    assert min(hits[tier] for tier in ("gpu", "host", "disk")) > 20


@pytest.mark.parametrize("where", ["pool", "shelf"])
def test_the_engine_notices_a_wrong_bit(where):
    engine = served(World())
    if where == "pool":
        engine.pool.planes[0].bitwise_xor_(1)
    else:
        for _, unit in engine.shelf.cells.values():
            unit.bitwise_xor_(1)
    assert "block" in first_wrong(engine)[0]


def test_the_engine_notices_a_disk_that_proves_nothing(tmp_path, monkeypatch):
    engine = served(World(), tmp_path)
    engine.faults.plan = lambda operation: "flip" if operation == "read" else None
    monkeypatch.setattr(DiskStorage, "read", lambda *_: None)
    assert any("flipped unnoticed" in what for what in first_wrong(engine))


def test_the_engine_notices_kept_memory_that_proves_nothing(memory, monkeypatch):
    engine, draw = Engine(World(), NONE.plan(0), keep=memory / "host"), random.Random(1)
    while engine.results.requests < 40:
        engine.serve(Request.batch(draw))
    monkeypatch.setattr(KeptPool, "verify", lambda *_: {})
    engine.faults.plan = lambda operation: "flip" if operation == "found" else None
    assert "block" in first_wrong(engine.successor(), seed=1)[0]
