"""Our radix cache and SGLang's own over two pools: full attention and sliding windows."""

from __future__ import annotations

import os
from types import SimpleNamespace

from hybrid_pools import HybridWorld, WindowPool, ended

import pytest  # isort: skip
import torch
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams

from kvtrie.engines.sglang.radix_start import radix_cache_of
from kvtrie.errors import ConfigError

OPERATIONS = int(os.environ.get("KVTRIE_SGLANG_OPERATIONS", "100000")) // 25


@pytest.mark.parametrize("kind", ["ours", "theirs"])
@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("pools", [(4096, 4096), (600, 280), (600, 600), (400, 160)])
def test_random_schedules_leave_every_slot_with_one_owner(kind, page, pools):
    world = HybridWorld(kind, *pools, window=16, page=page, seed=3)
    for step in range(OPERATIONS):
        world.play()
        if step % 20 == 0:
            world.balance()
        if kind == "ours" and step % 200 == 0:
            world.cache.manager.audit()
    ended(world)
    world.balance()
    if kind == "ours":
        assert world.cache.boundary.failures == 0
    assert world.cache.full_protected_size() == world.cache.swa_protected_size() == 0
    world.cache.sanity_check()
    assert world.found > 0.2 * world.requested
    world.cache.evict(EvictParams(num_tokens=pools[0], swa_num_tokens=pools[1]))
    assert world.allocator.full_available_size() == pools[0]
    assert world.allocator.swa_available_size() == pools[1]


@pytest.mark.parametrize("page", [1, 4])
def test_without_evictions_both_find_the_same(page, monkeypatch):
    # SGLang's cache may drop windows that a request has passed at once; ours keeps them.
    monkeypatch.setenv("SGLANG_OPT_UNIFIED_CACHE_FREE_OUT_OF_WINDOW_SLOTS", "0")
    ours, theirs = (
        HybridWorld(kind, 200_000, 200_000, window=16, page=page, seed=5)
        for kind in ("ours", "theirs")
    )
    for step in range(2000):
        ours.play()
        theirs.play()
        assert (ours.found, ours.requested) == (theirs.found, theirs.requested), step
        for mine, right in zip(ours.running, theirs.running, strict=True):
            assert mine.match.swa_branching_seqlen == right.match.swa_branching_seqlen
            assert mine.match.full_kv_hit_length == right.match.full_kv_hit_length
    ours.balance()
    theirs.balance()


def test_a_window_that_left_is_taken_from_the_next_request():
    """The first request decodes past its prompt: the prompt's end has lost its window."""
    world = HybridWorld("ours", 400, 200, window=16, page=4, seed=1)
    ids = list(range(64))
    first = world.begin(ids)
    assert world.step(first)
    while first.kv.kv_allocated_len < 64:
        assert world.step(first)
    world.end(first, keep=True)
    world.cache.evict(EvictParams(swa_num_tokens=1000))
    assert (world.cache.swa_evictable_size(), world.cache.full_evictable_size()) == (0, 64)
    again = world.begin([*ids, 1])
    assert again.match.device_prefix_len == 0
    assert again.match.swa_branching_seqlen == again.match.full_kv_hit_length == 64
    while again.kv.kv_allocated_len < 65:
        assert world.step(again)
    world.balance()
    assert world.cache.full_protected_size() == 64  # the slots of the first request
    world.end(again, keep=True)
    world.balance()
    assert world.begin([*ids, 2]).match.device_prefix_len == 64


def context(allocator, **more):
    params = CacheInitParams(
        disable=False,
        req_to_token_pool=None,
        token_to_kv_pool_allocator=allocator,
        page_size=1,
        sliding_window_size=8,
    )
    for name in [name for name in more if hasattr(params, name)]:
        setattr(params, name, more.pop(name))
    given = {"is_hybrid_swa": True, "is_hybrid_ssm": False, "enable_hierarchical_cache": False}
    given |= {"full_tokens_per_layer": 64, "tp_rank": 0, "tp_size": 1, "params": params}
    return SimpleNamespace(**(given | more))


def windows_of(full, swa, kind=SWATokenToKVPoolAllocator):
    return kind(full, swa, 1, torch.float16, "cpu", WindowPool(), need_sort=False)


def test_a_server_with_windows_is_served():
    made = radix_cache_of(context(windows_of(64, 32)))
    assert made.supports_swa()
    assert (made.pools.blocks, made.pools.windows, made.pools.window_blocks) == (64, 32, 8)
    assert (made.sliding_window_size, made.swa_retain_window) == (8, 8)


class Unified(SWATokenToKVPoolAllocator):
    """An allocator whose pools share bytes."""


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"full_tokens_per_layer": 0}, "models whose layers all have sliding windows"),
        ({"is_hybrid_ssm": True}, "does not serve state layers"),
        ({"kind": Unified}, "SGLang's Unified has the sliding windows"),
        ({"sliding_window_size": None}, "sliding windows of None tokens"),
        ({"swa_gates_prefix_match": False}, "swa_gates_prefix_match=False"),
        ({"decoder_swa_bounded_replay": True}, "decoder_swa_bounded_replay=True"),
        ({"swa": 0}, "64 and 0 tokens, at least a page of 1 wanted"),
    ],
)
def test_windows_that_are_not_served_are_named(more, said):
    allocator = windows_of(64, more.pop("swa", 32), more.pop("kind", SWATokenToKVPoolAllocator))
    with pytest.raises(ConfigError, match=said):
        radix_cache_of(context(allocator, **more))
