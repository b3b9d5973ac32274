"""Our radix cache and SGLang's own, inside SGLang's classes; every page has known content.

SGLang's engine has no CPU kernels; its classes use `benches/peers/stand_ins.py` instead.
"""

from __future__ import annotations

import inspect
import os
import random
from array import array

from benches.peers.stand_ins import Pool  # isort: skip - without it sglang does not load

import numpy as np
import pytest
import torch
from sglang.srt.disaggregation.kv_events import AllBlocksCleared, BlockRemoved
from sglang.srt.mem_cache import registry
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

from kvtrie import BlockManager
from kvtrie.engines.sglang import KvtrieRadixCache, plugin, radix
from kvtrie.errors import ConfigError

PAGE = Pool.page_size
OPERATIONS = int(os.environ.get("KVTRIE_SGLANG_OPERATIONS", "100000"))


def cache(kind, blocks, **more):
    pool = Pool(blocks)
    params = CacheInitParams(
        disable=False, req_to_token_pool=None, token_to_kv_pool_allocator=pool, page_size=PAGE
    )
    for name, value in more.items():
        setattr(params, name, value)
    made = RadixCache(params) if kind == "theirs" else KvtrieRadixCache(params, blocks=blocks)
    return made, pool


def key(pages, tail=0, salt=None, extra=None):
    """A key of pages, each of one number, and a part of one that is no page."""
    ids = [number * 1000 + at for number in pages for at in range(PAGE)]
    return RadixKey(array("q", ids + [7] * tail), extra, cache_salt=salt)


def test_a_pool_of_less_than_a_page_is_refused_in_words_of_sglang():
    pool = Pool(1)
    pool.size = PAGE - 1
    params = CacheInitParams(
        disable=False, req_to_token_pool=None, token_to_kv_pool_allocator=pool, page_size=PAGE
    )
    with pytest.raises(ConfigError, match=f"SGLang's KV pool has {PAGE - 1} tokens"):
        KvtrieRadixCache(params)


def test_the_plug_in_registers_the_name(monkeypatch):
    lines = []
    monkeypatch.setattr(radix._LOG, "info", lambda line, *more: lines.append(line % more))
    plugin.register()
    plugin.register()
    assert registry.registered_radix_cache_backends().count("kvtrie") == 1

    class Context:
        is_hybrid_swa = is_hybrid_ssm = enable_hierarchical_cache = False
        tp_rank, tp_size = 0, 1
        params = CacheInitParams(
            disable=False, req_to_token_pool=None, token_to_kv_pool_allocator=Pool(8),
            page_size=PAGE,
        )  # fmt: skip

    Context.params.token_to_kv_pool_allocator.size = 8 * PAGE
    made = registry.get_radix_cache_factory("kvtrie")(Context)
    assert isinstance(made, KvtrieRadixCache)
    assert lines == [
        f"kvtrie: gpu {8 * PAGE} tokens; block {PAGE} tokens; 1 rank; policy {made.policy}"
    ]
    assert made.misses is None  # without --enable-metrics
    Context.tp_rank = 1
    registry.get_radix_cache_factory("kvtrie")(Context)
    assert len(lines) == 1  # one line per server
    default = inspect.signature(BlockManager).parameters
    assert (made.policy, made._objective) == (default["policy"].default, "cost")
    Context.params.eviction_policy_config = {"policy": "flat", "objective": "hits"}
    made = registry.get_radix_cache_factory("kvtrie")(Context)
    assert (made.policy, made._objective) == ("flat", "hits")
    for given, message in (
        ({"threshold": 3}, "has no 'threshold'"),
        ({"policy": "best"}, "policy is one of"),
        ({"objective": "speed"}, "objective is one of cost, balanced, hits"),
        ({"policy": "lru", "objective": "hits"}, "objective"),
    ):
        Context.params.eviction_policy_config = given
        with pytest.raises(ConfigError, match=message):
            registry.get_radix_cache_factory("kvtrie")(Context)
    Context.params.eviction_policy_config = None
    Context.enable_hierarchical_cache = True
    with pytest.raises(ConfigError, match="hierarchical caches"):
        registry.get_radix_cache_factory("kvtrie")(Context)


def test_salts_and_adapters_part_keys_and_strange_ids_are_not_stored():
    ours, pool = cache("ours", 16)
    ours.insert(InsertParams(key=key([1, 2]), value=pool.alloc(2)))
    assert ours.match_prefix(MatchPrefixParams(key=key([1, 2, 3], tail=3))).device_prefix_len == (
        2 * PAGE
    )
    for other in (key([1, 2], salt="a"), key([1, 2], extra="lora")):
        assert ours.match_prefix(MatchPrefixParams(key=other)).device_prefix_len == 0
    image = RadixKey(array("q", [2**40 + at for at in range(PAGE)]))
    assert ours.insert(InsertParams(key=image, value=pool.alloc(1))).prefix_len == 0
    assert ours.total_size() == 2 * PAGE


class World:
    """Requests that come, run and end, through one cache; what each page holds is known."""

    def __init__(self, kind, blocks, seed, **more):
        self.cache, self.pool = cache(kind, blocks, **more)
        self.blocks, self.draw = blocks, random.Random(seed)
        self.holds = {}  # the path that a page's KV belongs to
        self.running = []
        self.found = self.requested = 0

    def path(self):
        head = [self.draw.randrange(6)] * self.draw.randint(1, 3)
        return [*head, *(self.draw.randrange(3) for _ in range(self.draw.randint(0, 6)))]

    def begin(self, pages):
        match = self.cache.match_prefix(MatchPrefixParams(key=key(pages)))
        lock = self.cache.lock(match.last_device_node)
        old = self.cache.path_device_indices(match.last_device_node)[: match.device_prefix_len]
        self.check(pages, old)
        need = len(pages) - len(old) // PAGE
        short = need - self.pool.free_blocks
        if short > 0:
            able, free = self.cache.evictable_size(), self.pool.free_blocks
            evicted = self.cache.evict(EvictParams(num_tokens=short * PAGE)).num_tokens_evicted
            assert evicted == (self.pool.free_blocks - free) * PAGE
            assert evicted >= min(short * PAGE, able)
        if need > self.pool.free_blocks:
            self.cache.unlock(lock)
            return False
        slots = torch.cat([old, self.pool.alloc(need)])
        for at in range(len(old) // PAGE, len(pages)):
            self.holds[int(slots[at * PAGE]) // PAGE] = tuple(pages[: at + 1])
        self.running.append((pages, slots, len(old), lock))
        self.found, self.requested = self.found + len(old), self.requested + len(pages) * PAGE
        return True

    def check(self, pages, slots):
        """A match's slots hold just what the key says."""
        firsts = slots[::PAGE].tolist()
        for at, first in enumerate(firsts):
            assert first % PAGE == 0
            assert self.holds[first // PAGE] == tuple(pages[: at + 1])
        rest = slots.numpy().reshape(-1, PAGE) - np.arange(PAGE)
        assert (rest == np.asarray(firsts, dtype=np.int64)[:, None]).all() or not firsts

    def end(self, *, keep):
        """End a request; as in SGLang, free pages that the tree already had."""
        pages, slots, protected, lock = self.running.pop(self.draw.randrange(len(self.running)))
        if keep:
            inserted = self.cache.insert(InsertParams(key=key(pages), value=slots))
            assert inserted.prefix_len >= protected
            self.pool.free_segment(slots[protected : inserted.prefix_len], start_pos=protected)
            assert len(self.cache.path_device_indices(inserted.last_device_node)) == len(slots)
        else:
            self.pool.free_segment(slots[protected:], start_pos=protected)
        self.cache.unlock(lock)

    def balance(self):
        """Every page is free, in the tree, or a running request's."""
        running_pages = sum(
            (len(slots) - protected) // PAGE for _, slots, protected, _ in self.running
        )
        size = self.cache.evictable_size() + self.cache.protected_size()
        assert size == self.cache.total_size()
        assert self.pool.free_blocks + running_pages + size // PAGE == self.blocks

    def step(self):
        what = self.draw.random()
        if what < 0.55 and len(self.running) < 4:
            self.begin(self.path())
        elif self.running:
            self.end(keep=what < 0.95)


def test_without_evictions_both_find_the_same():
    ours, theirs = World("ours", 4096, 1), World("theirs", 4096, 1)
    for step in range(2000):
        ours.step()
        theirs.step()
        assert (ours.found, ours.requested) == (theirs.found, theirs.requested)
        assert ours.pool.free_blocks == theirs.pool.free_blocks
        if step % 100 == 0:
            ours.balance()
            theirs.balance()
            assert ours.cache.total_size() == theirs.cache.total_size()
            assert ours.cache.protected_size() == theirs.cache.protected_size()


@pytest.mark.parametrize("kind", ["ours", "theirs"])
def test_random_operations_under_pressure(kind):
    """Half of the operations each; whatever is found is right, and no page is lost."""
    world = World(kind, 60, 2)
    for step in range(OPERATIONS // 2):
        world.step()
        if step % 50 == 0:
            world.balance()
        if kind == "ours" and step % 5000 == 0:
            world.cache.manager.audit()
    while world.running:
        world.end(keep=True)
    world.balance()
    assert world.cache.protected_size() == 0
    assert world.found > 0.3 * world.requested
    world.cache.evict(EvictParams(num_tokens=world.blocks * PAGE))
    assert world.pool.free_blocks == world.blocks
    world.cache.reset()
    assert world.cache.total_size() == 0


def replayed(events, published):
    """Blocks on any medium after events; checks each event against those before it."""
    for event in events:
        if isinstance(event, AllBlocksCleared):
            published.clear()
        elif isinstance(event, BlockRemoved):
            for each in event.block_hashes:
                del published[each]
        else:
            before = event.parent_block_hash
            assert before is None or before in published
            for at, each in enumerate(event.block_hashes):
                ids = tuple(event.token_ids[at * PAGE : (at + 1) * PAGE])
                assert each not in published
                assert event.block_size == len(ids) == PAGE
                published[each] = (before, ids, event.cache_salt, event.lora_name, event.medium)
                before = each
    return published


@pytest.mark.usefixtures("page_hashes")
@pytest.mark.parametrize("dynamo", [False, True])
def test_events_are_those_of_sglangs_own_cache(dynamo):
    more = {"enable_kv_cache_events": True, "dynamo_kv_event_format": dynamo}
    worlds = [World(kind, 4096, 3, **more) for kind in ("ours", "theirs")]
    tables = [{}, {}]
    for _ in range(300):
        for world, published in zip(worlds, tables, strict=True):
            world.step()
            replayed(world.cache.kv_events.take(), published)
        assert tables[0] == tables[1]
    # The older format leaves adapters without a public name out of its hashes.
    names = (("a", None), (None, "lora"), ("a", "lora")) if dynamo else (("a", None), ("b", None))
    for world, published in zip(worlds, tables, strict=True):
        for salt, extra in names:
            world.cache.insert(
                InsertParams(key=key([1, 2, 3], 4, salt, extra), value=world.pool.alloc(3))
            )
        replayed(world.cache.kv_events.take(), published)
    assert tables[0] == tables[1]
    assert len(tables[0]) * PAGE == worlds[0].cache.total_size()
    worlds[0].cache.reset()
    assert replayed(worlds[0].cache.kv_events.take(), tables[0]) == {}


@pytest.mark.usefixtures("page_hashes")
def test_events_under_pressure_list_the_cached_pages():
    world, published = World("ours", 60, 4, enable_kv_cache_events=True), {}
    removed = 0
    for _ in range(3000):
        world.step()
        events = world.cache.kv_events.take()
        removed += sum(len(each.block_hashes) for each in events if isinstance(each, BlockRemoved))
        replayed(events, published)
        assert len(published) * PAGE == world.cache.total_size()
        assert all(row[0] is None or row[0] in published for row in published.values())
    assert removed > 100
    published = {tuple(row[1]) for row in published.values()}
    assert published == {tuple(ids) for ids in cached_pages(world)}


def cached_pages(world):
    """Tokens of the pages in the tree: what their slots hold says which."""
    for first in world.cache.all_values_flatten()[::PAGE].tolist():
        number = world.holds[first // PAGE][-1]
        yield [number * 1000 + at for at in range(PAGE)]


def test_without_events_no_pages_are_remembered():
    world = World("ours", 60, 5)
    for _ in range(50):
        world.step()
    assert world.cache.total_size()
    assert world.cache.kv_events.take() == []
    assert not world.cache._published._pages


class Request:
    """A request with the fields that SGLang's `checkpoint` reads."""

    def __init__(self, ids, row, lock, node, protected):
        self.full_untruncated_fill_ids, self.origin_input_ids = array("q", ids), ids
        self.extra_key = self.cache_salt = self.priority = None
        self.lock, self.last_node = lock, node
        self.kv = type("Kv", (), {})()
        self.kv.req_pool_idx, self.kv.swa_evict_floor = row, 0
        self.kv.cache_protected_len, self.kv.cache_inserted_len = protected, 0


class Rows:
    """The table of requests and their slots."""

    def __init__(self):
        self.req_to_token = torch.zeros((2, 64 * PAGE), dtype=torch.int32)

    def write(self, where, values):
        self.req_to_token[where] = values.to(torch.int32)


def test_a_checkpoint_of_a_request_goes_through_sglangs_own_code():
    ours, pool = cache("ours", 16, req_to_token_pool=Rows())
    ids = list(key([1, 2, 3], tail=5).token_ids)
    slots = pool.alloc(4)
    ours.req_to_token_pool.req_to_token[0, : len(ids)] = slots[: len(ids)].to(torch.int32)
    first = Request(ids, 0, ours.lock(ours.root_node), ours.root_node, 0)
    ours.checkpoint(first, up_to=len(ids))
    assert first.kv.cache_protected_len == 3 * PAGE
    assert ours.protected_size() == 3 * PAGE
    again = pool.alloc(4)
    ours.req_to_token_pool.req_to_token[1, : len(ids)] = again[: len(ids)].to(torch.int32)
    second = Request(ids, 1, ours.lock(ours.root_node), ours.root_node, 0)
    free = pool.free_blocks
    ours.checkpoint(second, up_to=len(ids))
    assert pool.free_blocks == free + 3  # the slots that duplicate the first request's pages
    row = ours.req_to_token_pool.req_to_token
    assert (row[0, : 3 * PAGE] == row[1, : 3 * PAGE]).all()
    ours.unlock(first.lock)
    ours.unlock(second.lock)
    assert ours.evictable_size() == 3 * PAGE
