"""The cache store: chunks are found by content on any tier, a miss reports its kind."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry

from kvtrie import BlockManager, Lane, ModelShape, Scope, Tier
from kvtrie.errors import ConfigError, NoSpaceError
from kvtrie.fuse import CacheStore
from kvtrie.fuse.chunker import BySeparator, Given
from kvtrie.metrics import Collector
from kvtrie.tiers import open_pools
from kvtrie.transfer import Executor

SHAPE = ModelShape(layers=2, kv_heads=1, head_dim=4, fingerprint="chunks")
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
    executor = store.executor
    pool = executor.pools[0]
    lease = store.fetch(chunk)
    assert lease.matched == 0
    tokens = len(store.sequence(chunk))
    at = torch.arange(tokens)
    kv = torch.randn(2, 2, tokens, 1, 4, generator=torch.Generator().manual_seed(seed))
    for layer, units in enumerate(pool.table(lease.slots(0))):
        pool.scatter(units[at // SIZE], at % SIZE, *kv[layer])
    store.insert(lease, chunk, tier)
    executor.drain()
    return kv


def got(store, chunk):
    """The KV of a chunk that is there."""
    pool = store.executor.pools[0]
    with store.fetch(chunk) as lease:
        assert lease.matched == len(store.sequence(chunk))
        at = torch.arange(lease.matched)
        table = pool.table(lease.slots(0))
        return torch.stack([torch.stack(pool.gather(row[at // SIZE], at % SIZE)) for row in table])


def test_chunks_are_found_wherever_they_are_and_misses_have_their_kind(executor):
    store = CacheStore(executor, BySeparator((0,)))
    text = [*range(1, 8), 0, *range(11, 18), 0, 5, 0]
    first, second, short = store.chunks(text)
    looked = store.lookup(text)
    assert looked.found == []
    assert [miss.kind for miss in looked.missed] == ["absent"] * 3
    kv = put(store, first, 1)
    put(store, short, 2)
    again = store.lookup([*second, *first, *short])
    assert [found.tokens for found in again.found] == [8, 2]
    assert again.found[0].tier == "gpu"
    assert again.found[0].key == store.key(first)
    assert [miss.kind for miss in again.missed] == ["absent"]
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
        assert other.key(chunk) != store.key(chunk)
    changed = chunk.copy()
    changed[0] = 99
    assert store.lookup([changed]).found == []


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
    assert executor.manager.stats().leases == 0


def test_a_failed_insert_holds_no_lease(executor):
    store = CacheStore(executor, Given())
    chunk = np.arange(8)
    bad = [
        lambda lease: store.insert(lease, chunk, "disk"),
        lambda lease: store.insert(lease, [-1] * 8),
        lambda lease: store.insert(lease, np.arange(400)),
    ]
    for fail in bad:
        lease = store.fetch(chunk, wait=False)
        with pytest.raises((ConfigError, NoSpaceError)):
            fail(lease)
        assert executor.manager.stats().leases == 0
        assert store.lookup([chunk]).found == []


def test_a_prefix_that_is_no_token_is_refused(executor):
    for prefix in ([-1], [2**32], [2**70], [1.5]):
        with pytest.raises(ConfigError, match="prefix"):
            CacheStore(executor, Given(), prefix=prefix)


def test_hit_rates_are_of_the_chunks_looked_up_and_of_no_other_traffic(executor):
    store = CacheStore(executor, Given())
    other = CacheStore(executor, Given(), scope=Scope(tenant=b"other"))
    chunk = np.arange(8)
    put(store, chunk, 1)
    put(other, chunk, 1)
    before = store.feedback()
    assert set(before.hit_rate.values()) == {0}
    assert (before.chunks, before.missed) == (0, 0)
    text = [chunk, chunk + 100, np.arange(12)]  # two blocks, none, two of three
    store.lookup(text)
    for _ in range(5):
        other.lookup([chunk])
        with executor.manager.acquire(np.arange(8) + 50, now=executor.clock()):
            pass
    after = store.feedback()
    assert after.hit_rate == {"gpu": 4 / 7, "host": 0}
    assert (after.chunks, after.missed) == (3, 2)
    assert other.feedback().hit_rate == {"gpu": 1, "host": 0}


class Slow:
    """Memory below the first tier; a copy of a layer takes a hundred microseconds of `time`."""

    def __init__(self, time):
        self.time = time
        self.units = {}

    def write(self, key, slot, layers, memory, label):  # noqa: ARG002
        self.time.now += 100_000 * (layers[1] - layers[0])
        self.units[key] = memory.clone()

    def read(self, key, slot, layers, memory):  # noqa: ARG002
        self.time.now += 100_000 * (layers[1] - layers[0])
        memory.copy_(self.units[key][layers[0] : layers[1]])


class Time:
    now = 1_000

    def __call__(self):
        return self.now


def figures(speed):
    """Feedback, lane metrics and time of two chunks that evict each other, by declared speed."""
    lanes = {name: Lane(name, bytes_per_s=speed * 1e6, latency_ns=7) for name in ("up", "down")}
    tiers = [
        Tier("gpu", blocks=2),
        Tier("disk", blocks=8, read=lanes["up"], store=lanes["down"]),
    ]
    manager = BlockManager(SHAPE, tiers, block_tokens=SIZE, policy="lru")
    time = Time()
    pools = [open_pools(SHAPE, tiers[:1], SIZE)[0], Slow(time)]
    with Executor(manager, pools, workers=0, clock=time) as executor:
        store = CacheStore(executor, Given())
        for n in (0, 1, 0, 1):
            chunk = np.arange(8) + 100 * n
            store.lookup([chunk])
            lease = store.fetch(chunk)
            store.insert(lease, chunk)
            executor.drain()
            time.now += 50_000
        registry = CollectorRegistry()
        registry.register(Collector(manager))
        busy = {
            name: registry.get_sample_value(
                "kvtrie_lane_busy_seconds_total", {"machine": "0", "lane": name}
            )
            for name in lanes
        }
        return store.feedback(), busy, time.now - 1_000


def test_a_lane_declared_ten_times_faster_changes_no_figure():
    feedback, busy, elapsed = figures(1)
    assert figures(10)[:2] == (feedback, busy)
    assert feedback.fetch_ns["disk"] >= 200_000
    loads = 2 * 2 * 200e3 / 1e9  # two fetches of two blocks of two layers
    assert busy["up"] == pytest.approx(loads)
    assert feedback.bandwidth["up"] == pytest.approx(busy["up"] / (elapsed / 1e9))
    assert 0 < feedback.bandwidth["down"] < 1


def test_a_model_without_a_fingerprint_is_refused():
    shape = replace(SHAPE, fingerprint="")
    tiers = [Tier("gpu", blocks=4)]
    manager = BlockManager(shape, tiers, block_tokens=SIZE)
    with (
        Executor(manager, open_pools(shape, tiers, SIZE), workers=0) as executor,
        pytest.raises(ConfigError, match="fingerprint"),
    ):
        CacheStore(executor, Given())
