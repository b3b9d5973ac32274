"""Whatever a request contains: nothing raises, others are served, and the books are consistent."""

from __future__ import annotations

import logging
import os
from array import array

from benches.peers.stand_ins import Pool  # isort: skip - without it sglang does not load

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from kvtrie.engines.sglang import KvtrieRadixCache

PAGE, BLOCKS = Pool.page_size, 48
CASES = int(os.environ.get("KVTRIE_HOSTILE_CASES", "300"))

NAMES = st.one_of(
    st.none(),
    st.sampled_from(
        ["", "a", "b", "\ud800", "x" * 65_535, "é" * 40_000, 5, 1e300, [[]], {"a": []}, b"a"]
    ),
    st.text(max_size=5),
)
IDS = st.lists(
    st.sampled_from([0, 1, 2, 2**32 - 1, 2**32, 2**40, -1, 2**63 - 1, -(2**63)]), max_size=4
)
PRIORITIES = st.sampled_from([None, 0, 1, -5, 2**63 - 1, 2**70, "high", float("nan"), [], True])


class Rows:
    """The table of requests and their slots."""

    def __init__(self):
        self.req_to_token = torch.zeros((1, 8 * PAGE), dtype=torch.int32)

    def write(self, where, values):
        self.req_to_token[where] = values.to(torch.int32)


class Request:
    """The fields of a request that SGLang's `checkpoint` reads."""

    def __init__(self, ids, extra_key, cache_salt, priority, lock, node):
        self.full_untruncated_fill_ids = self.origin_input_ids = ids
        self.extra_key, self.cache_salt, self.priority = extra_key, cache_salt, priority
        self.lock, self.last_node = lock, node
        self.kv = type("Kv", (), {})()
        self.kv.req_pool_idx = self.kv.swa_evict_floor = 0
        self.kv.cache_protected_len = self.kv.cache_inserted_len = 0


def make_cache(*, events):
    pool = Pool(BLOCKS)
    params = CacheInitParams(
        disable=False, req_to_token_pool=Rows(), token_to_kv_pool_allocator=pool, page_size=PAGE,
        enable_kv_cache_events=events, dynamo_kv_event_format=events,
    )  # fmt: skip
    return KvtrieRadixCache(params, blocks=BLOCKS), pool


def serve(cache, pool, ids, extra_key=None, cache_salt=None, priority=None):
    """One request from its match to its release, as SGLang's scheduler calls the cache."""
    key = RadixKey(ids, extra_key, cache_salt=cache_salt)
    cache.touch_prefix(key)
    match = cache.match_prefix(MatchPrefixParams(key=key))
    lock = cache.lock(match.last_device_node)
    old = cache.path_device_indices(match.last_device_node)
    assert len(old) == match.device_prefix_len
    need = -(-len(ids) // PAGE) - len(old) // PAGE
    if need > pool.free_blocks:
        cache.evict(EvictParams(num_tokens=(need - pool.free_blocks) * PAGE))
    slots = torch.cat([old, pool.alloc(need)])[: len(ids)]
    cache.req_to_token_pool.req_to_token[0, : len(ids)] = slots.to(torch.int32)
    request = Request(ids, extra_key, cache_salt, priority, lock, match.last_device_node)
    request.kv.cache_protected_len = len(old)
    cache.checkpoint(request, up_to=len(ids))
    row = cache.req_to_token_pool.req_to_token[0].to(torch.int64)
    pool.free_segment(row[request.kv.cache_protected_len : len(ids)])
    cache.unlock(request.lock)
    return match.device_prefix_len


@pytest.mark.usefixtures("page_hashes")
@pytest.mark.parametrize("events", [False, True])
@settings(
    max_examples=CASES, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
@given(
    requests=st.lists(
        st.tuples(IDS, st.integers(0, PAGE - 1), NAMES, NAMES, PRIORITIES), min_size=1, max_size=4
    )
)
def test_no_content_raises_and_the_books_are_consistent(events, requests):
    cache, pool = make_cache(events=events)
    good = array("q", [7] * (2 * PAGE))
    serve(cache, pool, good)
    for pages, tail, extra_key, cache_salt, priority in requests:
        ids = array("q", [each for page in pages for each in [page] * PAGE] + [3] * tail)
        serve(cache, pool, ids, extra_key, cache_salt, priority)
        assert cache.protected_size() == 0
        assert pool.free_blocks * PAGE + cache.total_size() == BLOCKS * PAGE
    cache.manager.audit()
    assert serve(cache, pool, good) == len(good)
    cache.evict(EvictParams(num_tokens=BLOCKS * PAGE))
    assert (cache.total_size(), pool.free_blocks) == (0, BLOCKS)


@pytest.mark.parametrize(
    "scope",
    [
        {"extra_key": "\ud800"},
        {"cache_salt": "x" * 70_000},
        {"extra_key": 5},
        {"cache_salt": [["a"]]},
    ],
)
def test_a_scope_that_cannot_be_formed_neither_matches_nor_stores(scope):
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger("sglang.srt.kvtrie").addHandler(handler)
    cache, pool = make_cache(events=False)
    ids = array("q", [7] * PAGE)
    for _ in range(20):
        assert serve(cache, pool, ids, **scope) == 0
    assert cache.total_size() == 0
    assert cache.boundary.failures == 60
    logging.getLogger("sglang.srt.kvtrie").removeHandler(handler)
    assert len(records) == 5
    assert all(record.exc_info is None for record in records)


def test_a_failure_inside_an_insert_is_one_request_that_is_not_cached(monkeypatch):
    cache, pool = make_cache(events=False)
    ids = array("q", [7] * PAGE)
    with monkeypatch.context() as broken:
        broken.setattr(cache.slots, "_free", [])
        assert serve(cache, pool, ids) == 0
    assert pool.free_blocks == BLOCKS
    cache.manager.audit()
    assert serve(cache, pool, ids) == 0
    assert serve(cache, pool, ids) == PAGE


def test_an_insert_of_too_few_slots_stores_nothing():
    cache, pool = make_cache(events=False)
    ids = array("q", [7] * (2 * PAGE))
    cache.insert(InsertParams(key=RadixKey(ids), value=pool.alloc(1)))
    assert cache.total_size() == 0
    cache.manager.audit()
