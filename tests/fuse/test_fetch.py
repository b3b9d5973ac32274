"""Chunks of a request are leased at once and come whole, layer by layer; failures stay apart."""

import numpy as np
import pytest
import torch
from world import DIM, HEADS, LAYERS, compute, fill, right, store_of, truth, world

from kvtrie import Scope
from kvtrie.errors import ConfigError, NoSpaceError
from kvtrie.fuse import Chunk

PREFIX = [901, 902, 903, 904, 905, 906]  # a block and a half
A, B, C = np.arange(10), np.arange(10) + 100, np.arange(3) + 200


@pytest.fixture
def executor():
    with world() as executor:
        yield executor
        executor.drain()
        executor.manager.audit()
        assert executor.manager.stats().leases == 0


def read_all(store, chunks):
    """Fetch chunks that are all there and compare every layer; the fetch's parts."""
    with store.fetch_many(chunks) as fetch:
        assert list(fetch.absent()) == []
        for layer in range(LAYERS):
            assert fetch.wait(layer) == []
            for part in filter(None, (fetch.prefix, *fetch.parts)):
                assert right(store, fetch, part, layer)
        return fetch.parts


@pytest.mark.parametrize("prefix", [[], PREFIX, PREFIX[:3], PREFIX[:4]])
def test_chunks_of_any_length_come_back_whole(executor, prefix):
    store = store_of(executor, prefix)
    assert fill(store, A, B, C) == 3 + bool(prefix)
    parts = read_all(store, [A, B, C])
    assert [part.found for part in parts] == [10, 10, 3]
    assert {part.at for part in parts} == {len(prefix)}
    assert [one.tokens for one in store.lookup([A, B, C]).found] == [10, 10, 3]


def test_all_hits_in_a_new_order_with_one_twice_are_one_lease_each(executor):
    store = store_of(executor, PREFIX)
    fill(store, A, B, C)
    with store.fetch_many([C, A, C, B]) as fetch:
        assert fetch.order == (0, 1, 0, 2)
        assert executor.manager.stats().leases == 4  # and the prefix
        assert [part.state for part in fetch.parts] == ["hit"] * 3


def test_an_absent_chunk_is_stored_also_when_others_hit(executor):
    store = store_of(executor, PREFIX)
    fill(store, A)
    assert fill(store, A, B) == 1
    assert fill(store, B, A) == 0
    # A chunk whose first block is known computes the rest alone.
    longer = np.concatenate((A, B))
    with store.fetch_many([longer]) as fetch:
        part = next(fetch.absent())
        assert (part.found, part.start) == (10, 16)
        compute(fetch, part)


def test_a_chunk_after_the_prefix_is_the_plain_sequence(executor):
    """The first chunk of a context is an exact prefix hit, and other traffic's KV is a chunk's."""
    store = store_of(executor, PREFIX)
    fill(store, A)
    plain = [*PREFIX, *A.tolist()]
    assert executor.manager.lookup(plain, now=executor.clock(), keep=0).tokens == 16
    for scope in (Scope(tenant=b"other"), Scope(lora="other")):
        assert store_of(executor, PREFIX, scope=scope).lookup([A]).found == []


def test_chunks_come_from_below_layer_by_layer(executor):
    store = store_of(executor, PREFIX)
    fill(store, A, B, C)
    store.place([A, B, C], "host")
    executor.drain()
    with store.fetch_many([B, A]) as fetch:
        assert [part.tiers for part in fetch.parts] == [{"host": 10}] * 2
    read_all(store, [B, C, A])
    assert store.feedback().hit_rate["host"] > 0


def test_new_chunks_go_to_the_stores_tier_and_the_prefix_stays(executor):
    store = store_of(executor, PREFIX)
    store.tier = "host"
    fill(store, A, B)
    assert {found.tier for found in store.lookup([A, B]).found} == {"host"}
    now = executor.clock()
    match = executor.manager.lookup(store.sequence(), now=now, keep=0)
    assert {copy.tier for block in match.blocks for copy in block.copies} == {0}
    read_all(store, [A, B])


def test_no_room_leases_nothing():
    with world(gpu=8, host=2) as executor:
        store = store_of(executor, PREFIX)
        before = executor.manager.snapshot()
        with pytest.raises(NoSpaceError, match="blocks, gpu holds 8"):
            store.fetch_many([np.arange(20) + 100 * n for n in range(2)])
        assert executor.manager.snapshot() == before
        hold = executor.manager.acquire(np.arange(12) + 500, now=executor.clock())
        with pytest.raises(NoSpaceError):
            store.fetch_many([A, B])
        assert executor.manager.stats().leases == 1
        hold.release()
        assert fill(store, A) == 2
        executor.manager.audit()


def test_chunks_with_their_own_kv_come_from_no_store(executor):
    store = store_of(executor, PREFIX)
    kv = truth(C)
    chunk = Chunk(C, [(layer[0], layer[1]) for layer in kv], at=5)
    with store.fetch_many([chunk, C, chunk]) as fetch:
        assert fetch.order == (0, 1, 0)
        given = fetch.parts[0]
        assert (given.state, given.at) == ("given", 5)
        for part in fetch.absent():
            compute(fetch, part)
        fetch.wait(0)
        out = (torch.zeros(3, HEADS, DIM), torch.zeros(3, HEADS, DIM))
        assert torch.equal(fetch.read(given, 0, out).keys, kv[0, 0])
        fetch.read(fetch.parts[1], 0, out)
        assert torch.equal(out[1], truth([*PREFIX, *C])[0, 1, 6:])
    with pytest.raises(ConfigError, match="KV of 1 layers, the model has 3"):
        store.fetch_many([Chunk(C, [(kv[0, 0], kv[0, 1])])])
    with pytest.raises(ConfigError, match="3 tokens has 2 K"):
        Chunk(C, [(kv[0, 0, :2], kv[0, 1])])


def test_steps_out_of_order_are_refused(executor):
    store = store_of(executor)
    with store.fetch_many([A]) as fetch:
        with pytest.raises(ConfigError, match="absent"):
            fetch.wait(0)
        absent = fetch.absent()
        part = next(absent)
        with pytest.raises(ConfigError, match="rows of K"):
            fetch.write(part, 0, torch.zeros(1, HEADS, DIM), torch.zeros(1, HEADS, DIM))
        with pytest.raises(ConfigError, match="keep it"):
            next(absent)
        compute(fetch, part)
        with pytest.raises(ConfigError, match="not kept"):
            fetch.keep(part)
        with pytest.raises(ConfigError, match="layer 1 of 3"):
            fetch.wait(1)
    with pytest.raises(ConfigError, match="closed"):
        fetch.read(part, 0)


def test_a_scope_with_holes_is_refused_only_where_there_is_one():
    with world(structure="holes") as executor:
        assert fill(store_of(executor), A) == 1


@pytest.mark.parametrize("bad", [[[]], [[1.5]], [[-1]], [[[1]]]])
def test_chunks_that_are_no_tokens_are_refused(executor, bad):
    store = store_of(executor)
    with pytest.raises(ConfigError):
        store.fetch_many(bad)
