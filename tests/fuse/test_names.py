"""Names: a chunk has its own, and is found by it on a tier of any kind, after a restart too."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from world import LAYERS, SHAPE, SIZE, Shelf, fill, right, store_of, truth

from kvtrie import BlockManager, Scope, Tier
from kvtrie.errors import ConfigError, NoSpaceError
from kvtrie.fuse import CacheStore
from kvtrie.fuse.chunker import Given
from kvtrie.tiers import open_pools
from kvtrie.transfer import Executor

PREFIX = [901, 902, 903, 904, 905, 906]
A, B = np.arange(10), np.arange(3) + 100


def opened(*tiers, shape=SHAPE):
    """An executor over tiers; a remote one is a shelf."""
    manager = BlockManager(shape, tiers, block_tokens=SIZE, policy="lru")
    pools = open_pools(shape, tiers, SIZE)
    return Executor(manager, [Shelf() if pool is None else pool for pool in pools])


def tiers(disk, remote=16):
    return (
        Tier("gpu", blocks=16),
        Tier("host", blocks=16),
        Tier("disk", bytes=1 << 20, path=disk),
        Tier("remote", blocks=remote),
    )


def put(store, chunk, tier):
    """Write a chunk's KV to the slots of a lease, and insert it into a tier."""
    executor = store.executor
    lease = store.fetch(chunk)
    pool, sequence = executor.pools[0], store.sequence(chunk)
    at = torch.arange(len(sequence))
    for layer, units in enumerate(pool.table(lease.slots(0))):
        pool.scatter(units[at // SIZE], at % SIZE, *truth(sequence)[layer])
    store.insert(lease, chunk, tier)
    executor.drain()


def check(store, chunk):
    with store.fetch_many([chunk]) as fetch:
        assert list(fetch.absent()) == []
        for layer in range(LAYERS):
            assert fetch.wait(layer) == []
            assert right(store, fetch, fetch.parts[0], layer)


@pytest.mark.parametrize("prefix", [PREFIX, PREFIX[:4]])
@pytest.mark.parametrize("kind", ["gpu", "host", "disk", "remote"])
def test_a_chunk_goes_to_a_tier_of_any_kind(tmp_path, kind, prefix):
    """Its prefix stays on the first tier, also one without other chunks."""
    with opened(*tiers(tmp_path)) as executor:
        store = store_of(executor, prefix)
        fill(store)  # the prefix
        put(store, A, kind)
        places = store.locations(store.key(A))
        assert [(at.block, at.tier, at.layers) for at in places] == [
            (block, kind, (0, LAYERS)) for block in range(3)
        ]
        assert {len(at.slots) for at in places} == {1}
        now = executor.clock()
        blocks = executor.manager.lookup(store.sequence(), now=now, keep=0).blocks
        assert {copy.tier for block in blocks for copy in block.copies} == {0}
        check(store, A)
        assert executor.manager.stats().leases == 0


def test_no_room_is_refused_before_anything_is_stored(tmp_path):
    with opened(*tiers(tmp_path, remote=2)) as executor:
        store = store_of(executor)
        before = executor.manager.stats().blocks
        lease = store.fetch(A)
        with pytest.raises(NoSpaceError, match="want 3 slots of remote, where 2 are free") as error:
            store.insert(lease, A, "remote")
        assert (error.value.wanted, error.value.free) == (3, 2)
        stats = executor.manager.stats()
        assert (stats.leases, stats.blocks, stats.moves) == (0, before, 0)
        put(store, A, "disk")
    never = Tier("host", blocks=8, write="never")
    with opened(Tier("gpu", blocks=8), never) as executor:
        store = store_of(executor)
        lease = store.fetch(A)
        with pytest.raises(ConfigError, match="never"):
            store.insert(lease, A, "host")
        assert executor.manager.stats().leases == 0


@pytest.mark.parametrize("prefix", [[], PREFIX])
def test_names_lead_to_the_disk_after_a_restart(tmp_path, prefix):
    scope = Scope(tenant=b"t", extra=((1, b"image"),))
    with opened(*tiers(tmp_path)) as executor:
        store = store_of(executor, prefix, scope=scope)
        fill(store, A, B)
        keys = [store.key(A), store.key(B)]
        assert {at.tier for at in store.locations(keys[0])} == {"gpu"}
        executor.save()
    with opened(*tiers(tmp_path)) as executor:
        assert executor.restore()
        store = store_of(executor, prefix, scope=scope)
        found = [store.locations(key) for key in keys]
        blocks = [len(store.sequence(one)) // SIZE - len(prefix) // SIZE for one in (A, B)]
        assert [[at.block for at in each] for each in found] == [list(range(n)) for n in blocks]
        assert {(at.tier, at.layers) for each in found for at in each} == {("disk", (0, LAYERS))}
        assert store.locations(bytes(32)) == []
        assert store_of(executor, prefix).locations(keys[0]) == []
        check(store, A)


def test_kv_of_another_fingerprint_is_not_found(tmp_path):
    with opened(*tiers(tmp_path)) as executor:
        store = store_of(executor, PREFIX)
        fill(store, A)
        key = store.key(A)
        executor.save()
    with opened(*tiers(tmp_path), shape=replace(SHAPE, fingerprint="other")) as executor:
        executor.restore()
        store = store_of(executor, PREFIX)
        assert store.key(A) != key
        assert (store.lookup([A]).found, store.locations(key)) == ([], [])
        assert fill(store, A) == 2


def test_digests_are_not_taken_for_tokens(tmp_path):
    with opened(*tiers(tmp_path)) as executor:
        image = store_of(executor, scope=Scope(extra=((0, b"abcd"),)))
        alike = np.frombuffer(b"".join(n.to_bytes(8, "little") for n in (8, 0, 4)) + b"abcd", "<u4")
        assert image.key(A) != store_of(executor).key(np.concatenate((alike, A)))


DIGESTS = st.lists(
    st.tuples(st.sampled_from([0, 1, 9]), st.sampled_from([b"a", b"b", b"ab"])),
    max_size=2,
    unique_by=lambda pair: pair[0],
)


STORES = st.fixed_dictionaries(
    {
        "prefix": st.sampled_from([(), (1,), (1, 2), (0x6161,)]),
        "scope": st.builds(
            Scope,
            tenant=st.sampled_from([b"", b"a", b"ab"]),
            lora=st.sampled_from(["", "a", "b"]),
            extra=DIGESTS.map(tuple),
        ),
    }
)


@settings(max_examples=50)
@given(STORES, STORES, st.sampled_from([0, 1]))
def test_two_keys_are_equal_exactly_if_the_chunks_match(mine, theirs, last):
    """With digests at any offset, 0 too; one after the chunk's end does not change its key."""
    tiers = [Tier("gpu", blocks=4), Tier("host", blocks=8)]
    manager = BlockManager(SHAPE, tiers, block_tokens=SIZE)
    with Executor(manager, open_pools(SHAPE, tiers, SIZE), workers=0) as executor:
        one, two = (CacheStore(executor, Given(), **how) for how in (mine, theirs))
        chunk, other = np.arange(8), np.asarray([*range(7), 7 * last])
        one.insert(one.fetch(chunk), chunk)
        assert one.lookup([chunk]).found[0].key == one.key(chunk)
        assert bool(two.lookup([other]).found) == (two.key(other) == one.key(chunk))
