"""Servers of the naive engine over one shared store: what one has answered, the next one finds."""

import random
import threading
import time
from contextlib import suppress

import numpy as np
import pytest
from tests.engines.vllm_engine import SIZE, Engine, play

from kvtrie.engines.vllm.store_moves import DROPPED
from kvtrie.tiers.remote import Found, RemoteStorage

PROMPTS = [[at, *range(12)] for at in range(3)]  # three full blocks each
FULL = 3 * 3 * SIZE


def url_of(folder):
    return f"folder:{folder / 'kv'}"


def values(folder):
    """The files of the values in a store."""
    return sorted((folder / "kv").glob("[0-9a-f][0-9a-f]/*"))


def serve(folder, prompts=PROMPTS, *, ranks=1, host=24, settings=None, **more):
    """A server that answers prompts one after the other, and is still open."""
    store = {"path": url_of(folder)} | (settings or {})
    engine = Engine("", ranks, 0, 0, host, store=store, **more)
    engine.whole = True
    if engine.kinds:
        engine.some = lambda left, had=0: min(left, SIZE - had % SIZE)  # steps that end at borders
    for at, each in enumerate(prompts):
        engine.add(str(at), each, 1)
        engine.drain()
    assert engine.served == len(prompts)
    return engine


def close(*engines):
    for engine in engines:
        engine.scheduler.manager.audit()
        engine.close()
        assert engine.failed == 0


def test_the_next_server_finds_all_full_blocks(tmp_path):
    one, two = serve(tmp_path), serve(tmp_path)
    assert (one.found, two.found) == (0, FULL)
    tokens = two.scheduler.cache.counters.tokens
    assert (tokens["remote"], tokens["host"], tokens["disk"]) == (FULL, 0, 0)
    assert len(values(tmp_path)) == 3 * 3
    close(one, two)


@pytest.mark.grid
@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize(
    ("ranks", "more"), [(1, {}), (2, {}), (2, {"replicated": True, "stages": 2})]
)
def test_random_schedules_over_a_shared_store(tmp_path, ranks, more, ahead):
    found = 0
    for seed in (0, 1, 0):
        engine = Engine("", ranks, ahead, seed, store=url_of(tmp_path), **more)
        play(engine, 10, seed)
        engine.close()
        assert engine.failed == 0
        assert engine.served > 0
        found += engine.scheduler.cache.counters.tokens["remote"]
    assert found > 0


@pytest.mark.grid
@pytest.mark.parametrize("kinds", ["w", "s", "ws"])
@pytest.mark.parametrize(
    ("ranks", "stages", "disk"), [(1, 1, False), (2, 1, False), (1, 2, False), (1, 1, True)]
)
def test_random_schedules_of_windows_and_states_over_a_shared_store(
    tmp_path, kinds, ranks, stages, disk
):
    found = 0
    for at, seed in enumerate((0, 1, 0)):
        folder = tmp_path / f"disk{at}" if disk else ""
        more = {"store": url_of(tmp_path), "kinds": kinds, "stages": stages}
        engine = Engine(folder, ranks, at % 2, seed, **more)
        play(engine, 14, seed)
        engine.close()
        assert engine.failed == 0
        assert engine.served > 0
        found += engine.scheduler.cache.counters.tokens["remote"]
    assert found > 0


def value_of(folder, storage, key):
    """The file of a value of a storage."""
    name = storage.form.names(key).tobytes().hex()
    return folder / "kv" / name[:2] / name[2:]


def remove_value(folder, engine, group, block, rank=0):
    """Remove the value of a group of a block of the first prompt."""
    key = engine.scheduler.manager.keys(PROMPTS[0])[block : block + 1]
    value_of(folder, engine.workers[rank].remote.storage.groups[group], key).unlink()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_border_counts_when_every_group_has_its_part(tmp_path, ranks):
    one = serve(tmp_path, ranks=ranks, kinds="ws")
    assert one.scheduler.cache.counters.tokens["remote"] == 0
    two = serve(tmp_path, ranks=ranks, kinds="ws")
    assert two.scheduler.cache.counters.tokens["remote"] == two.found == FULL
    for group, block, found in ((2, 2, 2 * SIZE), (1, 1, SIZE), (0, 0, 0)):
        # The state of the last border; a window of the two last ones; a block of all tokens.
        remove_value(tmp_path, one, group, block, ranks - 1)
        three = serve(tmp_path, PROMPTS[:1], ranks=ranks, kinds="ws")
        assert three.found == found
        close(three)
        assert len(values(tmp_path)) == 3 * 3 * 3 * ranks  # written again
    close(one, two)


def test_a_disk_is_between_host_memory_and_the_store(tmp_path):
    found = 0
    for at, seed in enumerate((0, 0, 1)):
        engine = Engine(tmp_path / f"disk{at}", 1, 0, seed, store=url_of(tmp_path))
        play(engine, 10, seed)
        engine.close()
        assert engine.failed == 0
        found += engine.scheduler.cache.counters.tokens["remote"]
    assert found > 0


def test_values_that_vanish_or_are_damaged_are_misses(tmp_path):
    draw, lost, seed = random.Random(0), 0, 0
    # How many values are read after their damage depends on the threads.
    while seed < 3 or not lost:
        engine = Engine("", 2, seed % 2, seed % 2, store=url_of(tmp_path))
        step = engine.step

        def damaged(step=step):
            step()
            for file in values(tmp_path):
                fate = draw.random()
                if fate < 0.05:
                    file.unlink(missing_ok=True)
                elif fate < 0.1:
                    with suppress(FileNotFoundError):  # the server has removed it
                        data = bytearray(file.read_bytes())
                        data[draw.randrange(len(data))] ^= 1
                        file.write_bytes(data)

        engine.step = damaged
        play(engine, 10, seed % 2)
        engine.close()
        assert engine.failed == 0
        lost += sum(engine.scheduler.cache.counters.lost[f"store get: {why}"] for why in WHYS)
        seed += 1


def test_values_of_groups_that_are_lost_once_they_were_found_are_misses(tmp_path, monkeypatch):
    draw, read, lost, found = random.Random(0), RemoteStorage.read_many, 0, 0

    def read_damaged(storage, blocks, **more):
        for key, *_ in blocks:
            file = value_of(tmp_path, storage, np.frombuffer(key, np.uint8).reshape(1, 32))
            with suppress(FileNotFoundError):  # the server has removed it
                if draw.random() < 0.1:
                    file.unlink()
                elif draw.random() < 0.1:
                    file.write_bytes(file.read_bytes()[::-1])
        return read(storage, blocks, **more)

    monkeypatch.setattr(RemoteStorage, "read_many", read_damaged)
    for seed in (0, 1, 0, 1):
        engine = Engine("", 2, seed % 2, seed, store=url_of(tmp_path), kinds="ws")
        play(engine, 10, seed)
        engine.close()
        assert engine.failed == 0
        lost += sum(engine.scheduler.cache.counters.lost[f"store get: {why}"] for why in WHYS)
        found += engine.scheduler.cache.counters.tokens["remote"]
    assert lost > 0
    assert found > 0


WHYS = ("missing", "damaged")


def test_a_damaged_value_is_written_again(tmp_path):
    one = serve(tmp_path)
    for file in values(tmp_path):
        file.write_bytes(file.read_bytes()[::-1])
    two, three = serve(tmp_path), serve(tmp_path)
    assert (two.found, three.found) == (0, FULL)
    assert two.scheduler.cache.counters.lost["store get: damaged"] == 9
    close(one, two, three)


def test_a_block_that_the_store_has_lost_is_not_waited_for(tmp_path, monkeypatch):
    engine = serve(tmp_path, host=4)
    for file in values(tmp_path):
        file.unlink()
    monkeypatch.setattr(RemoteStorage, "read_many", None)  # is not called
    engine.add("again", PROMPTS[0], 1)
    engine.drain()
    assert (engine.served, engine.found) == (4, 0)
    close(engine)


def test_a_reset_drops_beliefs_and_deletes_nothing_in_the_store(tmp_path):
    engine = serve(tmp_path)
    before = [(file, file.read_bytes()) for file in values(tmp_path)]
    engine.scheduler.reset()
    engine.drain()
    storages = [worker.remote.storage for worker in engine.workers]
    storages += [*engine.scheduler.cache.store._storages()]
    assert all(not len(storage._beliefs) for storage in storages)
    assert engine.scheduler.manager.stats().blocks == 0
    assert [(file, file.read_bytes()) for file in values(tmp_path)] == before
    engine.add("again", PROMPTS[0], 1)
    engine.drain()
    assert engine.scheduler.cache.counters.tokens["remote"] == 3 * SIZE
    close(engine)


def test_kv_of_other_weights_is_not_found(tmp_path):
    engine = serve(tmp_path)
    engine.scheduler.reset()
    engine.drain()
    for worker in engine.workers:
        worker._identity.weights = lambda: b"others"
    engine.add("again", PROMPTS[0], 1)
    engine.drain()
    assert engine.scheduler.cache.identity.weights
    assert engine.found == 0
    close(engine)


@pytest.mark.parametrize(("replicated", "parts"), [(False, 2), (True, 1)])
def test_latent_kv_of_two_ranks_is_written_once(tmp_path, replicated, parts):
    one = serve(tmp_path, ranks=2, replicated=replicated)
    blocks = one.scheduler.manager.stats().tiers["remote"].copies
    assert len(values(tmp_path)) == parts * blocks
    two = serve(tmp_path, ranks=2, replicated=replicated)
    assert two.scheduler.cache.counters.tokens["remote"] == FULL
    other = serve(tmp_path, ranks=1)  # of another number of ranks, and not latent
    assert other.found == 0
    close(one, two, other)


def test_a_block_counts_when_every_rank_has_its_part(tmp_path):
    one = serve(tmp_path, PROMPTS[:1], ranks=2)
    remove_value(tmp_path, one, 0, 1, 1)
    two = serve(tmp_path, PROMPTS[:1], ranks=2)
    assert two.found == SIZE
    close(one, two)


def test_lookup_local_asks_no_store(tmp_path, monkeypatch):
    one = serve(tmp_path)
    monkeypatch.setattr(RemoteStorage, "find", None)  # is not called
    two = serve(tmp_path, host=4, settings={"lookup": "local"})
    assert two.found == 0
    two.add("again", PROMPTS[0], 1)
    two.drain()
    assert two.scheduler.cache.counters.tokens["remote"] > 0  # it has written them itself
    close(one, two)


def test_nothing_waits_for_writes_to_a_store_that_hangs(tmp_path, monkeypatch):
    released = threading.Event()
    monkeypatch.setattr(
        RemoteStorage,
        "write_many",
        lambda _, blocks, **__: released.wait(60) and ["too late"] * len(blocks),
    )
    engine = Engine("", 1, 0, 0, 8, store={"path": url_of(tmp_path), "workers": 1})
    engine.whole = True
    for at in range(12):
        engine.add(str(at), [at, *range(12)], 1)
        while engine.served <= at:
            engine.step()
        for _ in range(4):
            engine.step()
    on_host = [at for at in range(12) if engine.on_host([at, *range(12)])]
    assert len(on_host) > 1  # later blocks have taken the room of earlier ones
    assert on_host[-1] > 9
    assert engine.scheduler.cache.counters.lost[DROPPED] > 0
    released.set()
    engine.drain()
    engine.close()


def test_a_store_slower_than_eviction_gains_blocks(tmp_path, monkeypatch):
    permits, write_many = threading.Semaphore(0), RemoteStorage.write_many

    def write_slowly(storage, blocks, **more):
        assert permits.acquire(timeout=60)
        return write_many(storage, blocks, **more)

    monkeypatch.setattr(RemoteStorage, "write_many", write_slowly)
    engine = Engine("", 1, 0, 0, 8, store={"path": url_of(tmp_path), "workers": 1})
    engine.whole = True
    prompts = [[at, *range(12)] for at in range(12)]
    for at, prompt in enumerate(prompts):
        engine.add(str(at), prompt, 1)
        while engine.served <= at:
            engine.step()
        if at % 3 == 2:
            stored = len(values(tmp_path))
            permits.release()
            while len(values(tmp_path)) == stored:
                engine.step()
    engine.scheduler.manager.audit()
    assert engine.scheduler.cache.counters.lost[DROPPED] > 0
    permits.release(1000)
    engine.drain()
    stored = len(values(tmp_path))
    assert stored > len(prompts) // 3
    monkeypatch.undo()
    # The naive engine compares every byte that it loads.
    two = serve(tmp_path, prompts)
    assert 0 < two.found <= stored * SIZE
    close(engine, two)


@pytest.mark.parametrize("fault", ["find", "read_many"])
def test_a_store_that_hangs_ends_no_request_later_than_the_deadline(tmp_path, monkeypatch, fault):
    one = serve(tmp_path, PROMPTS[:1])
    hangs, released, now = threading.Event(), threading.Event(), time.time_ns()

    def hang(_, rows, *__, **___):
        hangs.set()
        released.wait(60)
        return Found(0, 0, 0, 0) if fault == "find" else ["late"] * len(rows)

    monkeypatch.setattr(RemoteStorage, fault, hang)
    # The workers measure real time: none of their limits passes in this test.
    times = {"deadline_s": 60, "lookup_s": 30}
    two = Engine("", 1, 0, 0, store=url_of(tmp_path), clock=lambda: now, **times)
    two.whole = True
    two.add("a", PROMPTS[0], 1)
    while not two.served:
        two.step()
        now += hangs.is_set() * 3_000_000_000
    lost = two.scheduler.cache.counters.lost
    assert lost["store lookup: no answer" if fault == "find" else "store too slow"] == 1
    assert two.found == 0
    assert two.scheduler.busy or fault == "find"  # a read that hangs is still under way
    released.set()
    two.drain()
    assert two.scheduler.manager.stats().moves == 0  # without a further request
    close(one, two)
