"""A chunk that is damaged or gone is computed alone; what the others load stays as it is."""

import threading

import numpy as np
import pytest
from world import LAYERS, SIZE, Shelf, compute, fill, right, store_of, world

from kvtrie.fuse.fetch import Fetch
from kvtrie.transfer import LayerwiseEngine

PREFIX = [901, 902, 903, 904, 905, 906]
CHUNKS = [np.arange(10) + 100 * n for n in range(3)]


@pytest.fixture
def shelf():
    return Shelf()


@pytest.fixture
def executor(shelf):
    with world(gpu=32, host=32, disk={"blocks": 64}, pools=[shelf]) as executor:
        yield executor
        executor.drain()
        executor.manager.audit()
        assert executor.manager.stats().leases == 0


def stored(executor, shelf, prefix=PREFIX):
    """A store whose chunks are only on the shelf, and the block keys of each chunk."""
    store = store_of(executor, prefix)
    keys = []
    for chunk in CHUNKS:
        before = set(shelf.units)
        fill(store, chunk)
        store.place([chunk], "disk")
        executor.drain()
        keys.append(sorted({key for key, _ in set(shelf.units) - before}))
    store.place([[]], "disk")  # the prefix too
    executor.drain()
    assert {found.tier for found in store.lookup(CHUNKS).found} == {"disk"}
    return store, keys


def fuse(store, chunks):
    """Go through a fetch as a fusor does; the parts that were computed at each layer."""
    lost = {}
    with store.fetch_many(chunks) as fetch:
        for part in fetch.absent():
            compute(fetch, part)
            lost.setdefault(-1, []).append(part)
        for layer in range(LAYERS):
            if failed := fetch.wait(layer):
                lost[layer] = failed
                assert {part.state for part in failed} == {"lost"}
                for part in fetch.absent():
                    compute(fetch, part)
            for part in filter(None, (fetch.prefix, *fetch.parts)):
                assert right(store, fetch, part, layer)
        return fetch, lost


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("gone", [False, True])
def test_a_chunk_that_fails_midway_is_recomputed(executor, shelf, layer, gone):
    store, keys = stored(executor, shelf)
    victim = (keys[1][0], layer)
    if gone:
        del shelf.units[victim]
    else:
        shelf.lost.add(victim)
    fetch, lost = fuse(store, CHUNKS)
    ((seen, parts),) = lost.items()
    assert seen <= layer  # layers are read ahead
    assert parts == [fetch.parts[1]]
    unaffected = [key for at in (0, 2) for key in keys[at]]
    assert {shelf.reads[key, at] for key in unaffected for at in range(LAYERS)} == {1}
    # It is stored again, and stays right.
    assert fuse(store, CHUNKS)[1] == {}


@pytest.mark.parametrize("block", range(3))
@pytest.mark.parametrize("layer", range(LAYERS))
def test_all_are_computed_after_a_prefix_that_fails(executor, shelf, block, layer):
    prefix = np.arange(14) + 900
    store, _ = stored(executor, shelf, prefix)
    shelf.lost.add((key_of(shelf, prefix, block), layer))
    fetch, lost = fuse(store, CHUNKS)
    ((_, parts),) = lost.items()
    assert parts[0] is fetch.prefix
    shelf.lost.clear()
    assert fuse(store, CHUNKS)[1] == {}


def test_a_chunk_may_be_the_first_to_see_that_a_load_of_the_prefix_failed(
    executor, shelf, monkeypatch
):
    prefix = np.arange(14) + 900
    store, _ = stored(executor, shelf, prefix)
    shelf.lost.add((key_of(shelf, prefix, 2), 0))
    bring = Fetch._bring

    def before_the_prefix(self, pending, layer):
        return bring(self, [part for part in pending if part is not self.prefix], layer)

    monkeypatch.setattr(Fetch, "_bring", before_the_prefix)
    fetch, lost = fuse(store, CHUNKS)
    assert lost == {0: [fetch.prefix, *fetch.parts]}


def test_a_load_of_another_fetch_may_fail_while_a_chunk_is_leased(executor, shelf, monkeypatch):
    store, keys = stored(executor, shelf)
    shelf.lost.add((keys[1][0], 0))
    opened, lease_one, leased, shortened = LayerwiseEngine.open, Fetch._lease_one, [], []
    gate, read = threading.Event(), shelf.read

    def late(key, *more):
        if key == keys[1][0]:
            assert gate.wait(60)
        read(key, *more)

    monkeypatch.setattr(shelf, "read", late)
    with store.fetch_many(CHUNKS) as other:

        def once_another_failed(self, lease):
            if not gate.is_set() and np.array_equal(leased[-1].tokens, CHUNKS[1]):
                found = lease.matched
                gate.set()
                assert other.wait(0) == [other.parts[1]]
                other.close()
                shortened.append(lease.matched < found)
            return opened(self, lease)

        def noted(self, part):
            leased.append(part)
            lease_one(self, part)

        monkeypatch.setattr(Fetch, "_lease_one", noted)
        monkeypatch.setattr(LayerwiseEngine, "open", once_another_failed)
        _, lost = fuse(store, CHUNKS)
    assert shortened == [True]
    assert [len(parts) for parts in lost.values()] == [1]


def key_of(shelf, prefix, block):
    """The key of a block of the prefix, found by the tokens in its label."""
    tokens = prefix[block * SIZE : (block + 1) * SIZE].astype("<u4").tobytes()
    (key,) = (key for key, label in shelf.labels.items() if tokens in label)
    return key


def test_the_past_of_an_absent_chunk_may_fail_too(executor, shelf):
    store, keys = stored(executor, shelf)
    chunk_keys = {key for part in keys for key in part}
    first = next(key for key, _ in shelf.units if key not in chunk_keys)
    shelf.lost.add((first, LAYERS - 1))
    fetch, lost = fuse(store, [np.arange(9) + 700, *CHUNKS])
    assert fetch.parts[0] in lost[-1]


def test_reads_that_all_fail_end(executor, shelf):
    store, _ = stored(executor, shelf, prefix=[])
    shelf.lost.update(shelf.units)
    fetch, lost = fuse(store, CHUNKS)
    assert lost == {0: list(fetch.parts)}
