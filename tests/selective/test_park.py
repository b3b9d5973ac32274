"""A selective cache waits on the host or on a disk and returns bit for bit, or not at all."""

from __future__ import annotations

import pytest
import torch
from decoders import make, tokens

from kvtrie import BlockManager, ModelShape, Scope, Tier
from kvtrie.errors import ClosedError, ConfigError, NoSpaceError
from kvtrie.selective import CacheSettings, SelectiveCache
from kvtrie.tiers import DiskStorage, open_pools
from kvtrie.transfer import Executor

BLOCK = 8


def serving(model, *, gpu=60, host=60, disk=None, disk_blocks=80):
    shape = ModelShape.from_config(model.config, fingerprint="parked")
    tiers = [Tier("gpu", blocks=gpu), Tier("host", blocks=host)]
    if disk is not None:
        tiers.append(Tier("disk", blocks=disk_blocks, path=str(disk)))
    manager = BlockManager(shape, tiers, block_tokens=BLOCK)
    pools = list(open_pools(shape, tiers[:2], BLOCK))
    if disk is not None:
        pools.append(DiskStorage(disk, shape, disk_blocks, BLOCK, durability="none"))
        assert not pools[2].read_only
    return Executor(manager, pools, workers=0)


def push_down(executor, seed):
    """Traffic that fills the first tier."""
    manager = executor.manager
    total = manager.tiers[0].blocks * BLOCK
    ids = tokens(seed, total).numpy()
    lease = manager.acquire(ids, now=executor.clock())
    executor.wait(lease)
    lease.commit(ids[lease.matched :], now=executor.clock())
    lease.release()
    executor.drain()


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("h2o-torch-quantized8", {"grace_period": 5}),
        ("lastrec-default", {"sinks": 2}),
        ("snapkv-int8", {}),
        ("mix-h2o+keydiff-default", {}),
    ],
)
def test_a_chat_returns_bit_for_bit(llama, name, arguments):
    settings = CacheSettings(name, cache_length=24, chunk_size=7, cache_kwargs=arguments)
    ids, more = tokens(1, 1, 60), tokens(2, 1, 20)
    with SelectiveCache(llama, settings) as cache:
        cache.read(ids)
        truth = cache.read(more)
    with serving(llama) as executor:
        cache = SelectiveCache(llama, settings)
        cache.read(ids)
        held = [[each.clone() for each in layer.state()[0].values()] for layer in cache.caches]
        parked = cache.park(executor)
        executor.drain()
        with pytest.raises(ClosedError):
            cache.read(more)
        push_down(executor, 3)
        again = parked.resume(llama)
        for layer, tensors in zip(again.caches, held, strict=True):
            now = layer.state()[0].values()
            assert all(torch.equal(one, other) for one, other in zip(now, tensors, strict=True))
        assert torch.equal(again.read(more), truth)
        again.close()
        with parked.resume(llama) as once_more:
            assert torch.equal(once_more.read(more), truth)
        parked.drop()
        with pytest.raises(ClosedError):
            parked.resume(llama)


@pytest.mark.parametrize("host", [24, 4, 3, 1])
def test_a_chat_waits_on_a_disk(llama, tmp_path, host):
    """The host's room runs out: by traffic, or because the chat alone is larger than all of it."""
    settings = CacheSettings("h2o-default", cache_length=24, chunk_size=7)
    ids, more = tokens(8, 1, 60), tokens(9, 1, 20)
    with SelectiveCache(llama, settings) as cache:
        cache.read(ids)
        truth = cache.read(more)
    with serving(llama, gpu=24, host=host, disk=tmp_path) as executor:
        cache = SelectiveCache(llama, settings)
        cache.read(ids)
        parked = cache.park(executor)
        executor.drain()
        for seed in (3, 4):
            push_down(executor, seed)
        before = executor.manager.stats().tiers["disk"].promoted
        again = parked.resume(llama)
        assert torch.equal(again.read(more), truth)
        again.close()
        assert executor.manager.stats().tiers["disk"].promoted > before
        push_down(executor, 5)
        with parked.resume(llama) as once_more:
            assert torch.equal(once_more.read(more), truth)
        executor.manager.audit()


def test_a_chat_goes_to_a_disk_at_once(llama, tmp_path):
    """If the disk is the second tier, nothing passes through the host's."""
    settings = CacheSettings("snapkv-int8", cache_length=24, chunk_size=7)
    ids, more = tokens(8, 1, 60), tokens(9, 1, 20)
    with SelectiveCache(llama, settings) as cache:
        cache.read(ids)
        truth = cache.read(more)
    shape = ModelShape.from_config(llama.config, fingerprint="parked")
    tiers = [Tier("gpu", blocks=24), Tier("disk", blocks=80, path=str(tmp_path))]
    manager = BlockManager(shape, tiers, block_tokens=BLOCK)
    pools = [
        open_pools(shape, tiers[:1], BLOCK)[0],
        DiskStorage(tmp_path, shape, 80, BLOCK, durability="none"),
    ]
    with Executor(manager, pools, workers=0) as executor:
        cache = SelectiveCache(llama, settings)
        cache.read(ids)
        parked = cache.park(executor)
        executor.drain()
        push_down(executor, 3)
        again = parked.resume(llama)
        assert torch.equal(again.read(more), truth)
        again.close()


@pytest.mark.parametrize(("host", "disk_blocks"), [(30, None), (30, 30), (2, 8), (2, None)])
def test_what_was_evicted_meanwhile_is_none(llama, tmp_path, host, disk_blocks):
    settings = CacheSettings("h2o-default", cache_length=64)
    disk = None if disk_blocks is None else tmp_path
    with serving(llama, gpu=30, host=host, disk=disk, disk_blocks=disk_blocks) as executor:
        cache = SelectiveCache(llama, settings)
        cache.read(tokens(1, 1, 100))
        parked = cache.park(executor)
        executor.drain()
        for seed in range(4):
            push_down(executor, seed)
        assert parked.resume(llama) is None
        with pytest.raises(ClosedError):
            parked.resume(llama)
        executor.manager.audit()


@pytest.mark.parametrize("host", [60, 3])
def test_a_chat_goes_on_waiting_while_there_is_no_room(llama, tmp_path, host):
    settings = CacheSettings("h2o-default", cache_length=24, chunk_size=7)
    ids, more = tokens(8, 1, 60), tokens(9, 1, 20)
    with SelectiveCache(llama, settings) as cache:
        cache.read(ids)
        truth = cache.read(more)
    with serving(llama, gpu=10, host=host, disk=tmp_path) as executor:
        cache = SelectiveCache(llama, settings)
        cache.read(ids)
        parked = cache.park(executor)
        manager, others = executor.manager, tokens(3, 10 * BLOCK).numpy()
        with manager.acquire(others, now=executor.clock()) as lease:
            executor.wait(lease)
            with pytest.raises(NoSpaceError, match="tier 'gpu' has no room"):
                parked.resume(llama)
        again = parked.resume(llama)
        assert torch.equal(again.read(more), truth)
        again.close()
        manager.audit()


def test_a_chat_without_room_to_pass_through_stays_open(llama):
    with (
        serving(llama, gpu=10) as executor,
        SelectiveCache(llama, CacheSettings("h2o-default", 24)) as cache,
    ):
        truth = cache.read(tokens(8, 1, 60)).clone()
        manager, others = executor.manager, tokens(3, 10 * BLOCK).numpy()
        with manager.acquire(others, now=executor.clock()) as lease:
            executor.wait(lease)
            with pytest.raises(NoSpaceError, match="tier 'gpu' has no room"):
                cache.park(executor)
        assert cache.get_seq_length() == 60
        cache.reset()
        assert torch.equal(cache.read(tokens(8, 1, 60)), truth)
        manager.audit()


def test_a_parked_cache_keeps_its_rope_and_batch():
    model = make(max_position_embeddings=64)
    settings = CacheSettings("h2o-default", cache_length=32, chunk_size=8)
    ids, more = tokens(4, 2, 90), tokens(5, 2, 6)
    mask = (torch.arange(90) >= torch.tensor([[0], [11]])).long()
    with serving(model) as executor:
        cache = SelectiveCache(model, settings, 2)
        cache.steps(200)
        cache.read(ids, mask)
        parked = cache.park(executor)
        again = parked.resume(model)
        assert again.rope_factor == 200 / 64
        assert again.caches[0].first.tolist() == [0, 11]
        found = again.read(more)
        again.close()
    with SelectiveCache(model, settings, 2) as cache:
        cache.steps(200)
        cache.read(ids, mask)
        assert torch.equal(cache.read(more, torch.cat((mask, torch.ones_like(more)), 1)), found)


def test_a_parked_cache_that_is_collected_gives_its_leases_back(llama):
    with serving(llama) as executor:
        cache = SelectiveCache(llama, CacheSettings("h2o-default", cache_length=24))
        cache.read(tokens(6, 1, 50))
        parked = cache.park(executor)
        (lease,) = parked._blocks._leases
        parked.resume(llama).close()
        assert lease.state == "suspended"
        del parked
        assert lease.state == "released"


def test_no_plain_scope_matches_what_is_parked(llama):
    with serving(llama) as executor:
        cache = SelectiveCache(llama, CacheSettings("h2o-default", cache_length=32))
        cache.read(tokens(6, 1, 50))
        parked = cache.park(executor)
        lease = parked._blocks._leases[0]
        assert lease.tokens > 0
        for scope in (None, Scope(), Scope(tenant=b"kvtrie selective ")):
            for first in (0, 1):
                zeros = torch.zeros(lease.tokens, dtype=torch.int64).numpy()
                zeros[0] = first
                found = executor.manager.lookup(zeros, now=executor.clock(), scope=scope)
                assert found.tokens == 0
        parked.drop()
        parked.drop()


def test_what_cannot_be_parked_is_refused(llama):
    shape = ModelShape.from_config(llama.config)
    tiers = [Tier("gpu", blocks=40)]
    executor = Executor(
        BlockManager(shape, tiers, block_tokens=BLOCK), open_pools(shape, tiers, BLOCK), workers=0
    )
    with executor, SelectiveCache(llama, CacheSettings("h2o-default", cache_length=16)) as cache:
        cache.read(tokens(7, 1, 10))
        with pytest.raises(ConfigError, match="has no other"):
            cache.park(executor)
        assert cache.get_seq_length() == 10  # it is still open
    with serving(llama) as executor:
        cache = SelectiveCache(llama, CacheSettings("h2o-default", cache_length=16))
        cache.read(tokens(7, 1, 10))
        parked = cache.park(executor)
        with pytest.raises(ConfigError, match="the cache was parked by"):
            parked.resume(make(seed=1))
        parked.drop()
