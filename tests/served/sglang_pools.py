"""Our radix cache and SGLang's own over pools of full attention, sliding windows and states."""

from __future__ import annotations

import os
from types import SimpleNamespace

from hybrid_pools import HybridWorld, Rows, WindowPool, ended

import pytest  # isort: skip
import torch
from sglang.srt.mem_cache.allocator.mamba import MambaSlotAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams

from kvtrie.engines.sglang.radix_start import radix_cache_of
from kvtrie.errors import ConfigError

OPERATIONS = int(os.environ.get("KVTRIE_SGLANG_OPERATIONS", "100000")) // 25


@pytest.mark.parametrize("kind", ["ours", "theirs"])
@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("pools", [(4096, 4096), (600, 280), (600, 600), (400, 160)])
def test_random_schedules_leave_every_slot_with_one_owner(kind, page, pools):
    play_all(kind, HybridWorld(kind, *pools, window=16, page=page, seed=3), pools)


@pytest.mark.parametrize("kind", ["ours", "theirs"])
@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("pools", [(4096, 0, 200), (600, 0, 30), (400, 160, 200), (600, 400, 18)])
def test_random_schedules_leave_every_state_with_one_owner(kind, page, pools):
    full, swa, states = pools
    world = HybridWorld(kind, full, swa, window=16, page=page, seed=4, states=states)
    play_all(kind, world, pools)
    assert world.rows.mamba_allocator.available_size() == states


def play_all(kind, world, pools):
    """Play a schedule to its end, and evict all that is cached."""
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
    assert world.found
    world.cache.evict(EvictParams(num_tokens=pools[0], swa_num_tokens=pools[1]))
    assert world.free() == [tokens for tokens in pools[:2] if tokens]


@pytest.mark.parametrize(
    ("page", "swa", "states"),
    [(1, 1, 0), (4, 1, 0), (1, 0, 1), (4, 0, 1), (1, 1, 1), (4, 1, 1)],
)
def test_without_evictions_both_find_the_same(page, swa, states, monkeypatch):
    # SGLang's cache may drop windows that a request has passed at once; ours keeps them.
    monkeypatch.setenv("SGLANG_OPT_UNIFIED_CACHE_FREE_OUT_OF_WINDOW_SLOTS", "0")
    ours, theirs = (
        HybridWorld(kind, 200_000, 200_000 * swa, 16, page, seed=5, states=20_000 * states)
        for kind in ("ours", "theirs")
    )
    for step in range(2000):
        ours.play()
        theirs.play()
        assert (ours.found, ours.requested) == (theirs.found, theirs.requested), step
        for mine, right in zip(ours.running, theirs.running, strict=True):
            for name in ("swa_branching_seqlen", "mamba_branching_seqlen", "full_kv_hit_length"):
                if swa or not name.startswith("swa"):
                    assert getattr(mine.match, name) == getattr(right.match, name), name
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


def test_a_server_with_states_is_served():
    made = radix_cache_of(states_of())
    assert (made.supports_mamba(), made.supports_swa()) == (True, False)
    assert (made.pools.blocks, made.pools.states, made.pools.states_at) == (64, 12, 1)
    assert made.available_and_evictable_str() == (
        "Available full tokens: 64, 0 evictable\nAvailable states: 12, 0 evictable\n"
    )


def states_of(rows=None, **more):
    allocator = TokenToKVPoolAllocator(64, torch.float16, "cpu", None, need_sort=False)
    rows = rows or Rows(8, 12, tracked=False)
    kind = {"is_hybrid_swa": False, "is_hybrid_ssm": True, "req_to_token_pool": rows}
    return context(allocator, **(kind | more))


class UnifiedStates(MambaSlotAllocator):
    """An allocator whose slots share bytes with others."""


def rows_of(allocator=None, checkpoints=None):
    rows = Rows(8, 12, tracked=False)
    rows.mamba_ckpt_pool = checkpoints
    rows.mamba_allocator = allocator or rows.mamba_allocator
    return rows


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"enable_mamba_extra_buffer_lazy": True}, "enable_mamba_extra_buffer_lazy is True"),
        ({"rows": rows_of(checkpoints=object())}, "a pool of checkpoints is True"),
        ({"rows": rows_of(UnifiedStates(12, "cpu"))}, "SGLang's UnifiedStates has the states"),
        ({"page_size": 4}, "pages of 4 tokens: without --enable-mamba-extra-buffer"),
    ],
)
def test_states_that_are_not_served_are_named(more, said):
    with pytest.raises(ConfigError, match=said):
        radix_cache_of(states_of(**more))


def test_a_state_of_a_request_that_is_not_cached_is_freed(monkeypatch):
    world = HybridWorld("ours", 400, 0, window=16, page=1, seed=1, states=8)
    for ids, broken in (([2**40, 1, 2], False), ([1, 2, 3], True)):
        request = world.begin(ids)
        while request.kv.kv_allocated_len < len(ids):
            assert world.step(request)
        with monkeypatch.context() as patch:
            if broken:
                patch.setattr(world.cache.slots, "_free", [])
                request.ids.append(4)
                assert world.compute(request, len(request.ids))
            world.end(request, keep=True)
        world.balance()
    assert world.cache.boundary.failures == 1
    assert world.rows.mamba_allocator.available_size() == 8 - world.cache.mamba_evictable_size()
