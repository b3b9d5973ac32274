"""KvtrieRadixCache: kvtrie's trie in place of SGLang's radix tree. A page is a block.

SGLang owns the pages and passes the token slots of each new block. The manager indexes the blocks
and selects blocks for eviction. Its own slots are only counted. Models with sliding windows or
state layers have a pool per kind of layer. A block may lose its window or state and keep the rest,
so a prefix matches up to the deepest border with all needed windows and states.
Invariant: a block keeps its token slots until it is evicted. A locked path is never evicted.
Cost: a lookup per match, a lease per insert, a reservation per eviction. 8 B per token of the pool.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections import Counter
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    DecLockRefResult,
    EvictResult,
    IncLockRefResult,
    InsertParams,
    InsertResult,
)
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from kvtrie import BlockManager
from kvtrie.engines.server.boundary import Boundary
from kvtrie.engines.server.tenant import Sharing
from kvtrie.engines.sglang.block_slots import BlockSlots
from kvtrie.engines.sglang.device_pools import FULL, DevicePools, state_allocator
from kvtrie.engines.sglang.events import PublishedPages
from kvtrie.engines.sglang.locks import Locks
from kvtrie.engines.sglang.misses import Matched, RequestMisses
from kvtrie.engines.sglang.path import Path, found, tokens_of
from kvtrie.engines.sglang.pool_sizes import PoolSizes
from kvtrie.errors import ConfigError
from kvtrie.settings.argument import whole, word
from kvtrie.settings.tier import DEFAULT_POLICY

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from sglang.srt.mem_cache.base_prefix_cache import (
        DecLockRefParams,
        EvictParams,
        MatchPrefixParams,
        MatchResult,
        TreeLock,
    )
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

    from kvtrie.engines.sglang.request_states import RequestStates

__all__ = ["KvtrieRadixCache", "Path"]

_LOG = logging.getLogger("sglang.srt.kvtrie")  # a name shown by SGLang
_FAR = 2**63


class KvtrieRadixCache(PoolSizes):
    """SGLang's prefix cache over a `BlockManager`.

    Args:
        params: SGLang's `CacheInitParams`.
        blocks: pages of the KV pool, None to ask the allocator.
        policy: the eviction policy.
        objective: the goal of policies by value: lower "cost" of recomputing blocks, more "hits",
            or "balanced".
        count_misses: count computed prompt tokens by cause, and export them to Prometheus.
        windows: layers with sliding windows have a separate pool.
        states: state layers have a separate pool.
        share_after: number of tenants computing a block before it is shared among tenants. None
            shares by `cache_salt` and `extra_key` alone.
        secret_file: a file with the secret used by the front end to sign tenants.

    Attributes:
        pools: the pools shared by the cache.
        slots: the slots of cached blocks in the pools.
        locks: paths locked by requests.
        manager: kvtrie's manager of the blocks.
        policy: the eviction policy.
        misses: counter of computed prompt tokens, None if disabled.
        sliding_window_size: tokens of the windows, None without a window pool.
        draft_swa_window: tokens of a draft model's windows in this pool.

    Raises:
        ConfigError: speculative decoding by EAGLE, pools refused by `DevicePools`, or settings
            refused by `Sharing.read`.
    """

    def __init__(
        self,
        params: CacheInitParams,
        *,
        blocks: int | None = None,
        policy: str = DEFAULT_POLICY,
        objective: Literal["cost", "balanced", "hits"] = "cost",
        count_misses: bool = False,
        windows: bool = False,
        states: bool = False,
        share_after: int | None = None,
        secret_file: str | None = None,
    ) -> None:
        self._sharing = Sharing.read(share_after, secret_file)
        if params.is_eagle:
            raise ConfigError("kvtrie keeps plain tokens: EAGLE's pairs are not supported")
        self.pools = DevicePools.of(params, blocks, windows=windows, states=states)
        self.enable_mamba_extra_buffer = params.enable_mamba_extra_buffer
        self._states: RequestStates | None = None
        self.sliding_window_size = params.sliding_window_size if windows else None
        self.draft_swa_window = params.draft_swa_window
        word("policy", policy, tuple(BlockManager.policies()))
        word("objective", objective, ("cost", "balanced", "hits"))
        self.policy: str = policy
        self._objective: Literal["cost", "balanced", "hits"] = objective
        self.boundary = Boundary("the radix cache kvtrie", _LOG)
        self.misses = RequestMisses() if count_misses else None
        super().__init__(params)
        if states:
            from kvtrie.engines.sglang.request_states import RequestStates

            self._states = RequestStates(self, params)
        if self.misses is not None and self.metrics_collector is not None:
            self.misses.labels = dict(self.metrics_collector.labels)

    def reset(self) -> None:
        """Drop all blocks. SGLang frees the pages itself."""
        super().reset()
        self.root_node = Path(np.empty(0, dtype=np.uint64), RadixKey(array("q")))
        self._empty_match_result = found(0, self.root_node)
        # With a single group, events are evictions. With several groups, events are all stored and
        # removed parts.
        pools = self.pools
        self.manager = BlockManager(
            pools.shape(),
            pools.tiers(),
            block_tokens=self.page_size,
            policy=self.policy,
            objective=self._objective,
            resume=pools.resume(),
            events=4 * pools.blocks + 1 if pools.several else pools.blocks + 1,
            events_of="residency" if pools.several else "evictions",
            explain=self.misses is not None,
        )
        if self.misses is not None:
            self.misses.use(self.manager)
        states = state_allocator(self.req_to_token_pool) if pools.states else None
        self.slots = BlockSlots(pools, self.token_to_kv_pool_allocator, states)
        self.locks = Locks(self.manager)
        self._published = PublishedPages(self.kv_events, self.page_size)

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """Return the longest cached prefix of whole pages."""
        result = self._empty_match_result
        with self.boundary.contained():
            result = self._match(params.key, params.req)
        return result if self._states is None else self._states.matched(params, result)

    def _match(self, key: RadixKey, req: Any) -> MatchResult:  # noqa: ANN401 - SGLang's `Req`
        named = None if self.disable else tokens_of(key, self.page_size, self._sharing)
        matched = None
        if self.misses is not None and req is not None and not req.output_ids:
            matched = Matched(req.rid, key, None if named is None else named[1])
        blocks, known = self.root_node.blocks, None
        if named is not None:
            tokens, scope = named
            match = self.manager.lookup(tokens, now=time.monotonic_ns(), scope=scope, keep=0)
            blocks = match.handles[: match.tokens // self.page_size]
            if self.pools.several:
                known = self.manager.known(tokens, scope=scope)
        if len(blocks):
            self._published.split(int(blocks[-1]))
        elif matched is None and not known:
            return self._empty_match_result
        grid = None if self._states is None else self._states.grid
        return found(len(blocks) * self.page_size, Path(blocks, None, matched), known, grid)

    def touch_prefix(self, key: RadixKey) -> None:
        """Record a use of the cached prefix of a key."""
        with self.boundary.contained():
            named = None if self.disable else tokens_of(key, self.page_size, self._sharing)
            if named is None:
                return
            tokens, scope = named
            now = time.monotonic_ns()
            match = self.manager.lookup(tokens, now=now, scope=scope, keep=0)
            if match.tokens:
                self.manager.acquire(
                    tokens[: match.tokens], now=now, scope=scope, keep=0, load="none"
                ).release(now=now)

    def insert(self, params: InsertParams) -> InsertResult:
        """Insert the missing pages of a key. Return the number of tokens already cached."""
        with self.boundary.contained():
            return self._insert(params)
        return InsertResult(prefix_len=0, last_device_node=self.root_node)

    def _insert(self, params: InsertParams) -> InsertResult:
        key, value = params.key, params.value
        if (
            self.disable
            or key is None
            or (named := tokens_of(key, self.page_size, self._sharing)) is None
        ):
            return InsertResult(prefix_len=0, last_device_node=self.root_node)
        tokens, scope = named
        now, size = time.monotonic_ns(), self.page_size
        # Without values, as in SGLang's simulations, token ids are used as slots.
        slots = tokens if value is None else np.asarray(value[: len(tokens)].cpu())
        if len(slots) < len(tokens):
            raise ConfigError(f"{len(tokens)} tokens have {len(slots)} slots")
        slots = slots.astype(np.int64).reshape(-1, size)
        with self.manager.acquire(tokens, now=now, scope=scope, keep=0, load="none") as lease:
            cached = lease.matched
            if self.pools.several:  # full attention may have more tokens than can be resumed
                cached = self.manager.known(tokens, scope=scope)
            self.slots.check_room((len(tokens) - cached) // size)
            # Nothing may fail between the commit and the entry of the rows.
            if lease.matched < len(tokens):
                new = lease.commit(tokens[lease.matched :], now=now).new.tolist()
                self.slots.enter(new, slots[len(slots) - len(new) :])
                if scope.share_after is not None:  # the request may not have matched all
                    cached = len(tokens) - len(new) * size
            blocks = lease.handles
            lease.release(now=now)
        result = InsertResult(prefix_len=cached, last_device_node=Path(blocks))
        if self.pools.several:
            path = blocks.tolist()
            result.mamba_exist = not self._keep_parts(path, cached // size, slots, params)
        if scope.share_after is None:  # else SGLang's hash of a page differs by tenant
            with self.boundary.contained():
                self._published.stored(blocks.tolist(), cached // size, key)
        return result

    def _keep_parts(
        self, blocks: list[int], cached_blocks: int, slots: NDArray[np.int64], params: InsertParams
    ) -> bool:
        """Keep windows and states of a path with new slots, and free the rest.

        Args:
            blocks: the path.
            cached_blocks: number of blocks already cached.
            slots: `(blocks, page_size)`, the new slots. Up to `params.prev_prefix_len`, they are
                the tree's slots.
            params: the length already left by the window of these slots, and the new state.

        Returns:
            Whether the state was taken.
        """
        size, dead = self.page_size, params.get_evicted_seqlen(ComponentType.SWA)
        first = max(params.prev_prefix_len, 0) // size
        lives = range(max(first, -(-dead // size)), len(blocks)) if self.pools.windows else range(0)
        live = {blocks[place] for place in lives}
        state = params.mamba_value
        ends: set[int] = set() if state is None else {blocks[-1]}
        events = self._events()
        self._free_removed(events)
        came: dict[int, set[int]] = {}
        for group, kept in ((self.pools.windows_at, live), (self.pools.states_at, ends)):
            stored = {block for new, of, block in events if new and of == group}
            came[group] = stored & kept
            if lost := list(stored - kept):
                self.manager.clear_copies(lost, "gpu", group=group, now=time.monotonic_ns())
        self._free_removed(self._events())
        if state is not None:
            self.slots.states.update(
                (block, state.reshape(1)) for block in came[self.pools.states_at]
            )
        self.slots.renew(blocks, slots, came[self.pools.windows_at], (first, cached_blocks), lives)
        return bool(came[self.pools.states_at])

    def state_of(self, path: Path) -> torch.Tensor | None:
        """Return the slot of the state at the end of a path, None without a state."""
        return self.slots.states.get(int(path.blocks[-1])) if len(path.blocks) else None

    def checkpoint(self, req: Any, *, up_to: int) -> None:  # noqa: ANN401 - SGLang's `Req`
        """Insert the computed tokens of a request, unless its content cannot be cached."""
        taken = False
        with self.boundary.contained():
            taken = not self.disable and self._checkpoint(req, up_to)
        if self._states is not None and not taken and req.finished():
            self._states.give_back(req, finished=True)

    def _checkpoint(self, req: Any, up_to: int) -> bool:  # noqa: ANN401 - as above
        """Insert a request. Return whether its state has been handled."""
        if self.misses is not None and isinstance(req.last_node, Path):
            self.misses.inserted(req.last_node.matched)
        ids = req.full_untruncated_fill_ids[:up_to]
        key = RadixKey(ids, req.extra_key, cache_salt=req.cache_salt)
        # Checked before the insert, because SGLang computes with the priority after it.
        whole("priority", req.priority or 0, -_FAR, _FAR - 1)
        if tokens_of(key, self.page_size, self._sharing) is None:
            return False
        if not self.pools.several:
            super().checkpoint(req, up_to=up_to)
            return True
        kv, branch, finished = req.kv, req.swa_branching_seqlen, req.finished()
        params = InsertParams(prev_prefix_len=kv.cache_protected_len)
        params.set_evicted_seqlen(ComponentType.SWA, kv.get_evicted_seqlen(ComponentType.SWA))
        if self._states is not None:
            ids = ids[: self._states.take(req, params, len(ids), finished=finished)]
        elif branch is not None and kv.cache_protected_len < branch <= len(ids):
            ids = ids[:branch]
        result = None
        with self.boundary.contained():
            result = self._enter(req, ids, params)
        if self._states is not None:
            self._states.give_back(req, finished=finished, result=result, params=params)
        if result is not None and branch is not None and kv.cache_protected_len >= branch:
            req.swa_branching_seqlen = None
        return True

    def _enter(self, req: Any, ids: array[int], params: InsertParams) -> InsertResult | None:  # noqa: ANN401 - as above
        """Insert tokens of a request, with its windows and state, and lock the new path."""
        kv, protected = req.kv, params.prev_prefix_len
        end = len(ids) // self.page_size * self.page_size
        if end <= 0 or end < protected:
            return None
        row = self.req_to_token_pool.req_to_token[kv.req_pool_idx, :end]
        params.key = RadixKey(ids[:end], req.extra_key, cache_salt=req.cache_salt)
        params.value = row.to(dtype=torch.int64, copy=True)
        result = self._insert(params)
        path = result.last_device_node
        slots = self.path_device_indices(path)
        self.req_to_token_pool.write((kv.req_pool_idx, slice(protected, end)), slots[protected:])
        self.unlock(req.lock)
        req.lock, req.last_node = self.lock(path), path
        kv.cache_protected_len = end
        kv.cache_inserted_len = max(kv.cache_inserted_len, end)
        return result

    def on_release(self, req: Any, *, checkpointed: bool) -> None:  # noqa: ANN401 - as above
        """Free the state of a request ended without a checkpoint."""
        if self._states is not None and not checkpointed:
            self._states.give_back(req, finished=True)

    def evict(self, params: EvictParams) -> EvictResult:
        """Evict at least the requested tokens of each pool, except locked tokens."""
        begun, size = time.perf_counter(), self.page_size
        if self.disable:
            return EvictResult()
        pools, freed = self.pools, Counter[int]()
        for group, asked in (
            (FULL, params.num_tokens),
            (pools.windows_at, params.swa_num_tokens),
            (pools.states_at, params.mamba_num),
        ):
            if group >= 0:
                wanted = -(-asked // pools.unit(group)) - freed[group]
                count = min(wanted, self.slots.count(group) - self.locks.count(group))
                if count > 0:
                    freed.update(self._evict(group, count))
        self.update_eviction_metrics(freed[FULL] * size, begun)
        return EvictResult(
            num_tokens_evicted=freed[FULL] * size,
            swa_num_tokens_evicted=freed[pools.windows_at] * size if pools.windows else 0,
            mamba_num_evicted=freed[pools.states_at] if pools.states else 0,
        )

    def _evict(self, group: int, count: int) -> dict[int, int]:
        """Evict pages of a pool. Return the number of freed pages by group."""
        now = time.monotonic_ns()
        if self.pools.several:
            self.manager.evict(count, "gpu", now=now, group=group)
            return self._free_removed(self._events())
        free = self.manager.stats().tiers["gpu"].free
        # Reserve all free blocks and `count` more, so `count` blocks are evicted.
        with self.manager.acquire(np.zeros(1, np.uint32), now=now, load="none") as room:
            room.reserve((free + count) * self.page_size, now=now)
            room.release(now=now)
        return self._free_removed(self._events())

    def _events(self) -> list[tuple[bool, int, int]]:
        """Return events since the last call: whether a part was stored, its group and block."""
        events = self.manager.take_events()
        return [(event.kind == "stored", event.group, event.block) for event in events]

    def _free_removed(self, events: list[tuple[bool, int, int]]) -> dict[int, int]:
        """Free the pages of parts removed from the manager. Return their number by group."""
        gone = [(group, block) for stored, group, block in events if not stored]
        freed = self.slots.left(gone)
        self._published.removed(block for group, block in gone if group == FULL)
        return freed

    def inc_lock_ref(self, node: Path) -> IncLockRefResult:  # pyright: ignore[reportIncompatibleMethodOverride] - our nodes are paths
        """Lock a path against eviction, with the window and state at its end."""
        if self.misses is not None and node.matched is not None:
            with self.boundary.contained():
                self.misses.locked(node.matched, len(node.blocks) * self.page_size)
        if self.disable or not len(node.blocks):
            return IncLockRefResult(delta=0)
        before = self.locks.count(FULL)
        blocks: list[int] = node.blocks.tolist()
        last: list[int] = blocks[-self.pools.window_blocks :] if self.pools.windows else []
        windows = [block for block in last if block in self.slots.windows]
        states = [block for block in blocks[-1:] if block in self.slots.states]
        node.locks.append(
            self.locks.take(
                {self.pools.windows_at: windows, self.pools.states_at: states, FULL: blocks}
            )
        )
        return IncLockRefResult(delta=(before - self.locks.count(FULL)) * self.page_size)

    def dec_lock_ref(  # pyright: ignore[reportIncompatibleMethodOverride] - as above
        self,
        node: Path,
        params: DecLockRefParams | None = None,  # noqa: ARG002
    ) -> DecLockRefResult:
        """Release the last lock of a path."""
        if self.disable or not node.locks:
            return DecLockRefResult(delta=0)
        before = self.locks.count(FULL)
        self.locks.give(node.locks.pop())
        return DecLockRefResult(delta=(before - self.locks.count(FULL)) * self.page_size)

    def release_swa_prefix_lock(self, req: Any) -> None:  # noqa: ANN401 - SGLang's `Req`
        """Unlock the window of a request's prefix, once the request's window has moved past it."""
        lock: TreeLock | None = req.lock
        if lock is None or lock.swa_released:
            return
        lock.swa_released = True
        held = [each for each in lock.node.locks if self.pools.windows_at in each.pins]
        if held:
            self.locks.give(held[-1], self.pools.windows_at)

    def swa_retain_floor(self, req: Any) -> int | None:  # noqa: ANN401 - SGLang's `Req`
        """Return the token from which a request keeps windows, so its last state has a window."""
        state = req.kv.mamba_last_track_seqlen if self.pools.states and self.pools.windows else None
        return None if state is None else state - self.pools.window

    def path_device_indices(self, node: Path) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride] - our nodes are paths
        """Return the token slots of a path, in order."""
        if not len(node.blocks):
            return self._empty_device_indices
        return self.slots.of(node.blocks.tolist()).to(self.device)

    def dfs_weight_order(self, node_handles: Sequence[Path]) -> list[int]:
        """Return the indices of requests, sorted by shared prefix."""
        paths = [handle.blocks.tolist() for handle in node_handles]
        return sorted(range(len(paths)), key=paths.__getitem__)

    def pretty_print(self) -> None:
        """Print the number of cached tokens."""
        print(f"#tokens: {self.total_size()}")  # noqa: T201 - called by SGLang
