"""Requests of a model with sliding windows and states, over SGLang's allocators and a cache.

Every slot of all pools has known content: the tokens up to its own. Kernels and memory are left
out.
"""

from __future__ import annotations

import random
from array import array
from types import SimpleNamespace

import benches.peers.stand_ins  # noqa: F401 - without it sglang does not load

import torch  # isort: skip
from sglang.srt.mem_cache.allocator.mamba import MambaSlotAllocator
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.base_swa_memory_pool import BaseSWAKVPool
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import free_swa_out_of_window_slots
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.components import mamba
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from kvtrie.engines.sglang import KvtrieRadixCache

SWA = ComponentType.SWA
MOST_TOKENS = 256


class WindowPool(BaseSWAKVPool):
    """A pool without memory, which knows the mapping."""

    def __init__(self):
        pass

    def register_mapping(self, full_to_swa_index_mapping):
        self.full_to_swa_index_mapping = full_to_swa_index_mapping

    def translate_loc_from_full_to_swa(self, kv_indices):
        return self.full_to_swa_index_mapping[kv_indices.to(torch.int64)]

    def get_state_buf_infos(self):
        return [], [], []


WindowPool.__abstractmethods__ = frozenset()


# The settings of a server that SGLang's component of states reads.
mamba.mamba_cache_chunk_size = lambda: 1
mamba.mamba_checkpoint_grid = lambda page: page
mamba.get_exec = lambda: SimpleNamespace(
    mamba=SimpleNamespace(mamba_max_states_per_path=-1, enable_mamba_extra_buffer_lazy=False)
)


class States:
    """Content of states, by slot."""

    replayssm_write_pos = None

    def __init__(self, size):
        self.size, self.content = size, {}

    def copy_from(self, sources, targets):
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            self.content[target] = self.content[source]


class Rows(HybridReqToTokenPool):
    """The table of requests and their slots, and the pool of states."""

    enable_mamba_extra_buffer_lazy = False
    mamba_ckpt_pool = None
    mamba_ping_pong_track_buffer_size = mamba_initial_tracking_slots = 2

    def __init__(self, requests, states, *, tracked):
        self.enable_mamba_extra_buffer = tracked
        self.req_index_to_mamba_ping_pong_track_buffer_mapping = torch.zeros(
            (requests, 2), dtype=torch.int64
        )
        self.mamba_allocator = MambaSlotAllocator(states, "cpu")
        self.mamba_pool = States(states)
        self.req_to_token = torch.zeros((requests, MOST_TOKENS), dtype=torch.int32)

    def write(self, where, values):
        self.req_to_token[where] = values.to(torch.int32)

    def translate_mamba_indices(self, slots):
        return slots


class Kv:
    """What a request has in the pools: the fields and rules of SGLang's `ReqKvInfo`."""

    def __init__(self, row):
        self.req_pool_idx, self.swa_evict_floor = row, 0
        self.cache_protected_len = self.cache_inserted_len = self.kv_allocated_len = 0
        self.dead = {}
        self.mamba_pool_idx = self.mamba_cow_src_index = self.mamba_last_track_seqlen = None
        self.mamba_ping_pong_track_buffer = self.mamba_prev_track_seqlen = None

    holds_kv = True

    @property
    def holds_mamba(self):
        return self.mamba_pool_idx is not None

    def get_evicted_seqlen(self, kind):
        return self.dead.get(kind, 0)

    def set_evicted_seqlen(self, kind, length):
        self.dead[kind] = length

    def swa_dead_lo(self, page_size):
        del page_size
        return self.cache_protected_len


class Request:
    """A request as a cache reads it."""

    rid, session_id, session, priority, kv_rotation_base = "r", None, None, None, None

    def __init__(self, ids, row, salt):
        self.ids, self.extra_key, self.cache_salt = array("q", ids), None, salt
        self.origin_input_ids = self.ids
        self.kv, self.lock, self.last_node = Kv(row), None, None
        self.swa_branching_seqlen, self.done, self.match = None, False, None
        self.mamba_branching_seqlen = None

    @property
    def full_untruncated_fill_ids(self):
        return self.ids

    def get_fill_ids(self):
        return self.ids

    def finished(self):
        return self.done


class HybridWorld:
    """Requests that come, are computed in chunks, decode and end.

    Args:
        kind: "ours" or "theirs".
        full: tokens of the pool of full attention.
        swa: tokens of the pool of windows; 0 for a model without windows.
        window: tokens of a window.
        page: tokens of a page.
        seed: of the schedule.
        states: slots of the pool of states; 0 for a model without states.
    """

    def __init__(self, kind, full, swa, window, page, seed, states=0, **more):
        self.page, self.draw, self.states = page, random.Random(seed), states
        self.window = window if swa else 0
        self.allocator = (
            SWATokenToKVPoolAllocator(
                full, swa, page, torch.float16, "cpu", WindowPool(), need_sort=False
            )
            if swa
            else TokenToKVPoolAllocator(full, torch.float16, "cpu", None, need_sort=False)
            if page == 1
            else PagedTokenToKVPoolAllocator(
                full, page, torch.float16, "cpu", None, need_sort=False
            )
        )
        # With pages of several tokens states are tracked at ends of pages, in two slots in turn.
        self.tracked = states > 0 and page > 1
        self.rows = Rows(8, states, tracked=self.tracked)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.allocator,
            page_size=page,
            sliding_window_size=window if swa else None,
            enable_mamba_extra_buffer=self.tracked,
            **more,
        )
        if kind == "theirs":
            parts = (ComponentType.FULL, SWA, ComponentType.MAMBA)
            params.tree_components = tuple(
                part for part, present in zip(parts, (1, swa, states), strict=True) if present
            )
            params.tree_core_backend = "python" if states else None
            self.cache = UnifiedRadixCache(params)
        else:
            self.cache = KvtrieRadixCache(params, windows=swa > 0, states=states > 0)
        self.full, self.swa = {}, {}  # content by slot
        self.running, self.free_rows = [], list(range(8))
        self.found = self.requested = self.refused = 0

    def prompt(self):
        """Tokens that share beginnings with other prompts."""
        draw = self.draw
        ids = [draw.randrange(3)] * draw.randint(4, 24)
        while draw.random() < 0.75:
            ids += [draw.randrange(3)] * draw.randint(1, 12)
        return ids[: MOST_TOKENS - 40]

    def begin(self, ids=None):
        """Match and lock a new request."""
        request = Request(self.prompt() if ids is None else ids, self.free_rows.pop(), None)
        key = RadixKey(request.ids[: len(request.ids) - 1], None, cache_salt=None)
        key = key.page_aligned(self.page)
        match = self.cache.match_prefix(
            MatchPrefixParams(key=key, req=request, cow_mamba=self.states > 0)
        )
        request.match, request.swa_branching_seqlen = match, match.swa_branching_seqlen
        request.mamba_branching_seqlen = match.mamba_branching_seqlen
        length = match.device_prefix_len
        assert match.swa_branching_seqlen is None or length < match.swa_branching_seqlen
        request.lock, request.last_node = (
            self.cache.lock(match.last_device_node),
            match.last_device_node,
        )
        slots = self.cache.path_device_indices(match.last_device_node)[:length]
        self.check(request.ids[:length], slots)
        self.rows.write((request.kv.req_pool_idx, slice(0, length)), slots)
        request.kv.cache_protected_len = request.kv.cache_inserted_len = length
        request.kv.kv_allocated_len = length
        self.found, self.requested = self.found + length, self.requested + len(request.ids)
        if self.states and length:
            held = int(request.kv.mamba_cow_src_index)
            assert self.rows.mamba_pool.content[held] == tuple(request.ids[:length])
        self.running.append(request)
        return request

    def check(self, ids, slots):
        """A match's slots hold what the key says, and so do the slots of its window."""
        ids, slots = ids.tolist(), slots.tolist()
        assert len(ids) == len(slots)
        for at, slot in enumerate(slots):
            assert self.full[slot] == tuple(ids[: at + 1])
        first = max(0, len(ids) - self.window) if self.window else len(ids)
        for at in range(first, len(ids)):
            assert self.swa[self.mapped(slots[at])] == tuple(ids[: at + 1])

    def mapped(self, slot):
        if not self.window:
            return 0
        return int(self.allocator.full_to_swa_index_mapping[slot])

    def room(self, tokens):
        """Whether both pools have room for whole pages, after evictions."""
        tokens = -(-tokens // self.page) * self.page
        short = [max(0, tokens - free) for free in self.free()]
        able = [self.cache.full_evictable_size(), self.cache.swa_evictable_size()]
        if any(short):
            self.allocator.evict_to_free_tokens(self.cache, tokens)
        free = self.free()
        for lacked, could, has in zip(short, able, free, strict=False):
            assert has >= tokens or could < lacked
        return min(free) >= tokens

    def free(self):
        """Free tokens of each pool of KV."""
        if not self.window:
            return [self.allocator.available_size()]
        return [self.allocator.full_available_size(), self.allocator.swa_available_size()]

    def hold_state(self, request):
        """Give a request a state, which is copied from its prefix or new; False without room."""
        kv, pool = request.kv, self.rows
        wanted = (not kv.holds_mamba) + 2 * (
            self.tracked and kv.mamba_ping_pong_track_buffer is None
        )
        short = wanted - pool.mamba_allocator.available_size()
        if short > 0:
            able = self.cache.mamba_evictable_size()
            self.cache.evict(EvictParams(mamba_num=short))
            if pool.mamba_allocator.available_size() < wanted:
                assert able < short
                return False
        if not kv.holds_mamba:
            kv.mamba_pool_idx = pool.mamba_allocator.alloc(1)[0]
            pool.mamba_pool.content[int(kv.mamba_pool_idx)] = ()
        if self.tracked and kv.mamba_ping_pong_track_buffer is None:
            pool._alloc_ping_pong_buffer(request)
            row = pool.req_index_to_mamba_ping_pong_track_buffer_mapping
            row[kv.req_pool_idx] = kv.mamba_ping_pong_track_buffer
        if kv.mamba_cow_src_index is not None:
            pool.mamba_pool.copy_from(kv.mamba_cow_src_index, kv.mamba_pool_idx.reshape(1))
            kv.mamba_cow_src_index = None
        return True

    def track(self, request, first, upto):
        """Keep the state at the last end of a page of a pass, as the scheduler does."""
        kv, pool, branch = request.kv, self.rows, request.mamba_branching_seqlen
        at = upto // self.page * self.page
        if branch is not None and first < branch < at:
            at = branch
        if at <= first:
            return
        slot = int(kv.mamba_ping_pong_track_buffer[kv.mamba_next_track_idx])
        pool.mamba_pool.content[slot] = tuple(request.ids[:at])
        kv.mamba_last_track_idx = kv.mamba_next_track_idx
        kv.mamba_next_track_idx = pool.get_mamba_ping_pong_other_idx(kv.mamba_next_track_idx)
        kv.mamba_prev_track_seqlen, kv.mamba_last_track_seqlen = kv.mamba_last_track_seqlen, at

    def compute(self, request, upto):
        """Allocate and write tokens up to a length; False without room."""
        kv = request.kv
        if self.states and not self.hold_state(request):
            return False
        first, last = kv.kv_allocated_len, -(-upto // self.page) * self.page
        held = -(-first // self.page) * self.page
        if last > held:
            if not self.room(last - held):
                return False
            if self.window:
                full = self.allocator.full_attn_allocator.alloc(last - held)
                swa = self.allocator.swa_attn_allocator.alloc(last - held)
                self.allocator.set_full_to_swa_mapping(full, swa)
            else:
                full = self.allocator.alloc(last - held)
            self.rows.write((kv.req_pool_idx, slice(held, last)), full)
        row = self.rows.req_to_token[kv.req_pool_idx]
        self.check_pass(request, first, row)
        for at in range(first, upto):
            content = tuple(request.ids[: at + 1])
            self.full[int(row[at])] = content
            if self.window:
                self.swa[self.mapped(row[at])] = content
        if self.states:
            content, slot = self.rows.mamba_pool.content, int(kv.mamba_pool_idx)
            assert content[slot] == tuple(request.ids[:first])
            content[slot] = tuple(request.ids[:upto])
        if self.tracked:
            self.track(request, first, upto)
        kv.kv_allocated_len = upto
        return True

    def check_pass(self, request, first, row):
        """What a pass attends to is there."""
        before = max(0, first - self.window + 1) if self.window else first
        for at in range(before, first):
            assert self.swa[self.mapped(row[at])] == tuple(request.ids[: at + 1])
        for at in range(first):
            assert self.full[int(row[at])] == tuple(request.ids[: at + 1])

    def slide(self, request):
        """Free windows that the request has passed, as the scheduler does."""
        if not self.window:
            return
        free_swa_out_of_window_slots(
            request,
            request.kv.kv_allocated_len - 1,
            sliding_window_size=self.window,
            page_size=self.page,
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.allocator,
            retain_floor=self.cache.swa_retain_floor(request),
        )

    def step(self, request):
        """A chunk of the prompt, or a token."""
        done, draw = request.kv.kv_allocated_len, self.draw
        if done < len(request.ids):
            upto = min(len(request.ids), done + draw.choice((8, 16, 40)))
            branch = request.mamba_branching_seqlen or request.swa_branching_seqlen
            if branch is not None and done < branch < upto and draw.random() < 0.5:
                upto = branch
            if not self.compute(request, upto):
                return False
            request.ids, whole = request.ids[:upto], request.ids
            self.cache.checkpoint(request, up_to=upto)
            request.ids = whole
            return True
        request.ids.append(draw.randrange(3))
        if not self.compute(request, len(request.ids)):
            request.ids.pop()
            return False
        self.slide(request)
        past = len(request.ids) - len(request.origin_input_ids) > self.window
        if self.window and draw.random() < 0.1 and past:
            self.cache.release_swa_prefix_lock(request)
        return True

    def end(self, request, *, keep):
        """End a request as SGLang's `release_kv_cache` does."""
        self.running.remove(request)
        kv = request.kv
        request.ids = request.ids[: kv.kv_allocated_len]
        request.done = True
        if self.tracked and kv.mamba_ping_pong_track_buffer is None and kv.holds_mamba:
            # It was matched and never run: SGLang frees its state by itself.
            self.rows.mamba_allocator.free(kv.mamba_pool_idx.reshape(1))
            kv.mamba_pool_idx = None
        keep = keep and (not self.states or kv.holds_mamba)
        if keep:
            self.cache.checkpoint(request, up_to=kv.kv_allocated_len)
        self.cache.free_kv_row(kv, [(kv.cache_protected_len, kv.kv_allocated_len)])
        self.cache.unlock(request.lock)
        if not self.states or kv.holds_mamba:
            self.cache.on_release(request, checkpointed=keep)
        self.free_rows.append(kv.req_pool_idx)

    def play(self, most=4):
        """One step of the schedule."""
        draw = self.draw
        if len(self.running) < most and draw.random() < 0.3:
            self.begin()
        elif self.running:
            request = draw.choice(self.running)
            whole = request.kv.kv_allocated_len >= len(request.origin_input_ids)
            if (whole and draw.random() < 0.15) or len(request.ids) >= MOST_TOKENS - 1:
                self.end(request, keep=True)
            elif not self.step(request):
                self.refused += 1
                self.end(request, keep=False)

    def balance(self):
        """Every slot of both pools is free, the tree's or a request's, and only one of them."""
        cache, allocator, page = self.cache, self.allocator, self.page
        tree = cache.all_values_flatten().tolist()
        owned = list(tree)
        windows = [self.mapped(slot) for slot in tree if self.mapped(slot)]
        states = cache.all_mamba_values_flatten().tolist() if self.states else []
        assert len(tree) == cache.full_evictable_size() + cache.full_protected_size()
        assert len(windows) == cache.swa_evictable_size() + cache.swa_protected_size()
        if self.states:
            assert len(states) == cache.mamba_evictable_size() + cache.mamba_protected_size()
            for request in self.running:
                if request.kv.holds_mamba:
                    states.append(int(request.kv.mamba_pool_idx))
                if request.kv.mamba_ping_pong_track_buffer is not None:
                    states += request.kv.mamba_ping_pong_track_buffer.tolist()
            free = self.rows.mamba_allocator.free_slots.tolist()
            assert sorted([*states, *free]) == list(range(1, self.states + 1))
        for request in self.running:
            kv = request.kv
            first, last = kv.cache_protected_len, -(-kv.kv_allocated_len // page) * page
            row = self.rows.req_to_token[kv.req_pool_idx, first:last].tolist()
            owned += row
            if not self.window:
                continue
            dead = max(0, kv.get_evicted_seqlen(SWA) - first)
            assert not any(self.mapped(slot) for slot in row[:dead])
            windows += [self.mapped(slot) for slot in row[dead:]]
        if not self.window:
            self.once(owned, allocator, allocator.size)
            return
        self.once(owned, allocator.full_attn_allocator, allocator.size_full)
        self.once(windows, allocator.swa_attn_allocator, allocator.size_swa)

    def once(self, owned, allocator, size):
        pages = [one for one in (allocator.free_pages, allocator.release_pages) if one is not None]
        free = torch.cat(pages).tolist()
        if self.page > 1:
            free = [number * self.page + at for number in free for at in range(self.page)]
        assert sorted([*owned, *free]) == list(range(self.page, self.page + size))


def ended(world):
    """End all requests of a world."""
    while world.running:
        world.end(world.running[0], keep=True)
    return SimpleNamespace(found=world.found, requested=world.requested)
