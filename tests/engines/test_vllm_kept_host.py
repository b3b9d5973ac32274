"""Host memory of a vLLM server in a file: what the next server finds, and what is a miss."""

import random
from dataclasses import replace

import numpy as np
import pytest
from kept import flip, memory_folder
from tests.engines import vllm_engine
from tests.engines.vllm_engine import LAYERS, SIZE, Engine, play

from kvtrie.errors import ConfigError
from kvtrie.tiers import KeptPool, Pool

PROMPTS = [[at, *range(1, 3 * SIZE), at] for at in range(5)]
WHOLE = 3 * SIZE * len(PROMPTS)


@pytest.fixture
def path():
    """A path for a kept file."""
    with memory_folder() as folder:
        yield folder / "pool"


def kept_engine(path, ranks=1, *, folder="", host=20, seed=0, **more):
    return Engine(folder, ranks, 0, seed, host, keep=path, **more)


def ask(engine, prompts=PROMPTS):
    """Tokens of prompts that were found in host memory or on disk, asked one by one."""
    before = engine.found
    for tokens in prompts:
        engine.add(str(len(engine.seen)), tokens, 1)
        engine.drain()
    assert engine.failed == 0
    return engine.found - before


def fill(path, **more):
    engine = kept_engine(path, **more)
    assert ask(engine) == 0
    engine.close()


def lost(engine):
    return {why: count for why, count in engine.scheduler.cache.counters.lost.items() if count}


@pytest.mark.parametrize(("ranks", "replicated"), [(1, False), (2, False), (2, True)])
def test_the_next_server_finds_every_block(path, ranks, replicated):
    fill(path, ranks=ranks, replicated=replicated)
    engine = kept_engine(path, ranks, replicated=replicated)
    assert ask(engine) == WHOLE
    assert not lost(engine)
    assert not engine.scheduler.cache.unverified
    files = sorted(one.name for one in path.parent.iterdir())
    assert files == (["pool"] if ranks == 1 else ["pool-0"] if replicated else ["pool-0", "pool-1"])
    engine.close()


@pytest.mark.parametrize("stages", [1, 2])
def test_servers_that_follow_each_other_read_the_right_bytes(path, tmp_path, stages):
    found = 0
    for seed in range(8):
        folder, ranks = tmp_path if seed % 2 else "", 1 + seed % 4 // 2
        host, name = (4 if folder else 9), path.with_name(f"{ranks} {bool(folder)}")
        engine = kept_engine(name, ranks, folder=folder, host=host, seed=seed, stages=stages)
        play(engine, 25, seed=seed % 2)
        engine.close()
        found += engine.found
        assert engine.failed == 0
    assert found > 500


@pytest.mark.grid
@pytest.mark.parametrize("kinds", ["w", "s", "ws"])
@pytest.mark.parametrize("ahead", [0, 1])
def test_windows_and_states_of_an_earlier_server_are_found(path, tmp_path, kinds, ahead):
    found = 0
    for seed in range(4):
        engine = kept_engine(
            path, folder=tmp_path if seed % 2 else "", host=9, seed=seed, kinds=kinds
        )
        engine.ahead = ahead
        before = bool(engine.scheduler.cache.unverified)
        assert before == (seed > 0)
        play(engine, 20, seed=seed % 2)
        engine.close()
        found += engine.found
        assert engine.failed == 0
        assert not engine.scheduler.cache.counters.lost["an unexpected error"]
    assert found > 100


@pytest.mark.parametrize(("kinds", "group"), [("w", 0), ("w", 1), ("s", 1), ("ws", 2)])
def test_a_damaged_window_or_state_is_a_miss(path, kinds, group):
    prompt = [*range(1, 3 * SIZE + 1), 1]  # a state is kept where a step ends
    engine = kept_engine(path, kinds=kinds)
    engine.whole = True
    assert ask(engine, [prompt[: 3 * SIZE]]) == 0
    assert ask(engine, [prompt]) > 0
    part = engine.workers[0].host.groups[group]
    sequence = np.array(prompt, np.uint32)
    slots = [
        copy.slot
        for block in engine.scheduler.manager.lookup(sequence, now=10**18, keep=1).blocks
        for copy in block.copies
        if (copy.tier, copy.group) == (1, group)
    ]
    places = [int(part.slots.rows(part.units(slot, 0, 1), 1)[0]) for slot in slots]
    engine.close()
    assert places
    pool = path.with_name(f"{path.name}-pages")
    for place in places:
        flip(pool, place + 5)
    engine = kept_engine(path, kinds=kinds)
    engine.whole = True
    assert ask(engine, [prompt]) == 0
    assert engine.scheduler.cache.unverified.damaged > 0
    assert (engine.late, engine.failed) == (0, 0)
    # A block of the first group is stored again once it has left.
    ask(engine, [prompt[: 3 * SIZE]])
    assert (ask(engine, [prompt]) > 0) == (group > 0)
    engine.close()


def test_stores_are_sealed_while_the_server_runs(path):
    engine = kept_engine(path)
    ask(engine)
    (worker,) = engine.workers
    while worker.host.unsealed:
        worker.host.seal()
    assert worker.host.kept_blocks == 3 * len(PROMPTS)
    engine.step()
    assert engine.scheduler.reports.kept_blocks == {0: 3 * len(PROMPTS)}
    engine.close()


def test_a_damaged_block_is_a_miss_and_fails_no_request(path):
    fill(path)
    block = LAYERS * SIZE * 2 * 2 * 8 * 4
    pool = path.stat().st_size - 20 * block
    engine = kept_engine(path)
    slots = engine.scheduler.manager.index("host", now=0).slot.tolist()
    engine.close()
    flip(path, pool + slots[0] * block + 5)
    engine = kept_engine(path)
    found = ask(engine)
    assert WHOLE - 3 * SIZE <= found < WHOLE
    assert engine.scheduler.cache.unverified.damaged == 1
    assert lost(engine) == {"kept block: checksum": 1}
    again = ask(engine)
    assert again >= found
    engine.close()


def test_a_second_server_starts_cold_with_a_pool_of_its_own(path, caplog):
    first = kept_engine(path)
    ask(first)
    second = kept_engine(path)
    assert "writes there, so this process starts with a pool of its own" in caplog.text
    assert type(second.workers[0].host) is Pool
    assert ask(second) == 0
    second.close()
    assert ask(first) == WHOLE
    first.close()
    third = kept_engine(path)
    assert isinstance(third.workers[0].host, KeptPool)
    assert ask(third) == WHOLE
    third.close()


def test_other_weights_are_refused_or_a_cold_start(path, monkeypatch):
    fill(path)
    served = vllm_engine.served

    def trained(*args, **more):
        model = served(*args, **more)
        return replace(model, shape=replace(model.shape, fingerprint="other weights"))

    monkeypatch.setattr(vllm_engine, "served", trained)
    with pytest.raises(ConfigError, match="keep_replace"):
        kept_engine(path)
    monkeypatch.undo()
    engine = kept_engine(path)
    assert ask(engine) == WHOLE
    engine.close()
    monkeypatch.setattr(vllm_engine, "served", trained)
    monkeypatch.setattr(vllm_engine, "KEPT", {"keep_replace": True})
    engine = kept_engine(path)
    assert ask(engine) == 0
    engine.close()


def test_a_reset_leaves_nothing_for_the_next_server(path):
    engine = kept_engine(path)
    ask(engine)
    engine.scheduler.reset()
    engine.drain()
    assert engine.workers[0].host.kept_blocks == 0
    assert ask(engine, PROMPTS[:1]) == 0
    engine.close()
    engine = kept_engine(path)
    assert ask(engine) == 3 * SIZE
    engine.close()


def test_copies_that_fail_are_not_found(path, monkeypatch):
    copy, draw = Pool.copy_from, random.Random(3)

    def fail(self, *args):
        if draw.random() < 0.4:
            raise OSError("injected")
        copy(self, *args)

    monkeypatch.setattr(KeptPool, "copy_from", fail)
    engine = kept_engine(path)
    play(engine, 20, 3)
    engine.close()
    monkeypatch.undo()
    engine = kept_engine(path)
    play(engine, 20, 3)
    assert engine.found > 0
    engine.close()


def test_the_next_server_evicts_the_block_that_was_used_least_recently(path):
    clock = Clock()
    engine = kept_engine(path, host=16, clock=clock, policy="lru")
    for at in (0, 1, 2, 3, 4, 0):
        clock.now += 10**10
        ask(engine, [PROMPTS[at]])
    engine.close()
    engine = kept_engine(path, host=16, clock=clock, policy="lru")
    index = engine.scheduler.manager.index("host", now=clock.now)
    ages = dict(zip([key.tobytes() for key in index.key], index.age.tolist(), strict=True))
    assert [max(ages[key] for key in path_keys(engine, tokens)) for tokens in PROMPTS] == [
        at * 10**10 for at in (0, 4, 3, 2, 1)
    ]
    engine.close()


class Clock:
    def __init__(self):
        self.now = 10**15

    def __call__(self):
        return self.now


def path_keys(engine, tokens):
    manager = engine.scheduler.manager
    handles = manager.lookup(tokens, now=engine.scheduler.cache.clock(), keep=0).handles
    return [key.tobytes() for key in manager.index("host", now=0, blocks=np.asarray(handles)).key]
