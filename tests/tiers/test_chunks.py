"""The cache store: chunks are found by content on any tier, misses are told with their kind."""

import numpy as np
import pytest
import torch

from kvtrie import BlockManager, ModelShape, Scope, Tier
from kvtrie.errors import ConfigError
from kvtrie.fuse.chunker import BySeparator, Given
from kvtrie.tiers import CacheStore, open_pools
from kvtrie.transfer import Executor

SHAPE = ModelShape(layers=2, kv_heads=1, head_dim=4)
SIZE = 4


@pytest.fixture
def executor():
    tiers = [Tier("gpu", blocks=4), Tier("host", blocks=8)]
    manager = BlockManager(SHAPE, tiers, block_tokens=SIZE, policy="lru", eviction_log=50)
    with Executor(manager, open_pools(SHAPE, tiers, SIZE)) as executor:
        yield executor
        executor.drain()
        manager.audit()


def put(store, chunk, seed, tier=None):
    """Invent the KV of a chunk and insert it; what was written."""
    executor = store._executor
    pool = executor.pools[0]
    lease = store.fetch(chunk)
    assert lease.matched == 0
    at = torch.arange(len(chunk))
    kv = torch.randn(2, 2, len(chunk), 1, 4, generator=torch.Generator().manual_seed(seed))
    for layer, units in enumerate(pool.table(lease.slots(0))):
        pool.scatter(units[at // SIZE], at % SIZE, *kv[layer])
    store.insert(lease, chunk, tier)
    executor.drain()
    return kv


def got(store, chunk):
    """The KV of a chunk that is there."""
    pool = store._executor.pools[0]
    with store.fetch(chunk) as lease:
        assert lease.matched == len(chunk)
        at = torch.arange(len(chunk))
        table = pool.table(lease.slots(0))
        return torch.stack([torch.stack(pool.gather(row[at // SIZE], at % SIZE)) for row in table])


def test_chunks_are_found_wherever_they_stand_and_misses_tell_their_kind(executor):
    store = CacheStore(executor, BySeparator((0,)))
    text = [*range(1, 8), 0, *range(11, 18), 0, 5, 0]
    first, second, short = store.chunks(text)
    looked = store.lookup(text)
    assert looked.found == []
    assert [miss.kind for miss in looked.missed] == ["absent", "absent", "short"]
    kv = put(store, first, 1)
    again = store.lookup([*second, *first, *short])
    assert [found.tokens for found in again.found] == [8]
    assert again.found[0].tier == "gpu"
    assert again.found[0].key == store.key(first)
    assert [miss.kind for miss in again.missed] == ["absent", "short"]
    assert torch.equal(got(store, first), kv)
    longer = CacheStore(executor, Given()).lookup([[*first, 1, 2, 3, 0]])
    assert [(miss.kind, miss.tokens) for miss in longer.missed] == [("partial", 8)]


def test_other_prefixes_tenants_and_first_tokens_do_not_match(executor):
    store = CacheStore(executor, Given())
    chunk = np.arange(8)
    put(store, chunk, 1)
    others = [
        CacheStore(executor, Given(), prefix=[1]),
        CacheStore(executor, Given(), scope=Scope(tenant=b"other")),
    ]
    for other in others:
        assert other.lookup([chunk]).found == []
        assert other.key(chunk) != store.key(chunk) or other is others[1]
    changed = chunk.copy()
    changed[0] = 99
    assert store.lookup([changed]).found == []
    lookup = executor.manager.lookup(chunk, now=executor.clock(), keep=0)
    assert lookup.tokens == 0  # nor does plain text


def test_eviction_goes_down_tier_by_tier_and_is_logged(executor):
    store = CacheStore(executor, Given())
    chunks = [np.arange(8) + 100 * n for n in range(7)]
    written = [put(store, chunk, n) for n, chunk in enumerate(chunks)]
    tiers = {found.tier for chunk in chunks for found in store.lookup([chunk]).found}
    assert tiers == {"gpu", "host"}
    log = store.evictions()
    assert {(entry.tier, entry.to) for entry in log} >= {(0, 1), (1, None)}
    assert store.lookup([chunks[0]]).missed[0].kind == "absent"  # the least recently used
    assert torch.equal(got(store, chunks[4]), written[4])
    feedback = store.feedback()
    assert 0 < feedback.hit_rate["host"] <= 1
    assert feedback.fetch_ns["host"] > 0
    assert set(feedback.bandwidth) == set(executor.manager.stats().lanes)
    assert feedback.missed >= 1
    assert feedback.chunks == 8


def test_a_chunk_is_inserted_into_a_named_tier(executor):
    store = CacheStore(executor, Given())
    chunk = np.arange(8)
    kv = put(store, chunk, 1, "host")
    assert [found.tier for found in store.lookup([chunk]).found] == ["host"]
    assert torch.equal(got(store, chunk), kv)
    lease = store.fetch(chunk + 50, wait=False)
    with pytest.raises(ConfigError, match="into gpu or host, not 'disk'"):
        store.insert(lease, chunk + 50, "disk")
    lease.release()
