"""KvtrieRadixCache: kvtrie's trie in place of SGLang's radix tree. A page is a block.

SGLang owns the pages and passes the token slots of each new block; the manager knows the blocks and
chooses which of them are evicted, and its own slots are only counted. Models with sliding windows
have a pool for each kind of layers: a block may lose its window and keep the rest, and a prefix is
found up to the deepest border whose window is there.
Invariant: a block keeps its token slots until it is evicted; a locked path is never evicted.
Cost: a lookup per match, a request of the manager per insert, a reservation per eviction; 8 B per
token of the pool.
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
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from kvtrie import BlockManager
from kvtrie.engines.server.boundary import Boundary
from kvtrie.engines.sglang.block_slots import BlockSlots
from kvtrie.engines.sglang.device_pools import FULL, WINDOWS, DevicePools
from kvtrie.engines.sglang.events import PublishedPages
from kvtrie.engines.sglang.locks import Locks
from kvtrie.engines.sglang.misses import Matched, RequestMisses
from kvtrie.engines.sglang.path import Path, found, tokens_of
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

__all__ = ["KvtrieRadixCache"]

_LOG = logging.getLogger("sglang.srt.kvtrie")  # whose lines SGLang shows
_FAR = 2**63


class KvtrieRadixCache(RadixCache):
    """SGLang's prefix cache over a `BlockManager`.

    Args:
        params: SGLang's `CacheInitParams`.
        blocks: pages of the KV pool; None asks the allocator.
        policy: which blocks are evicted first.
        objective: what policies by value save: the "cost" of computing blocks again, or "hits".
        count_misses: count computed prompt tokens by cause, and export them to Prometheus.
        windows: layers with sliding windows have a pool of their own.

    Attributes:
        pools: the pools that the cache divides.
        policy: which blocks are evicted first.
        misses: counts computed prompt tokens; None if they are not counted.
        sliding_window_size: tokens of the windows; None without a pool of them.
        draft_swa_window: tokens of a draft's windows in that pool.

    Raises:
        ConfigError: what the cache does not serve: speculative decoding by EAGLE, state layers,
            hierarchical caches, pools that `DevicePools` refuses.
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
    ) -> None:
        if params.is_eagle:
            raise ConfigError("kvtrie keeps plain tokens: EAGLE's pairs are not supported")
        self.pools = DevicePools.of(params, blocks, windows=windows)
        self.sliding_window_size = params.sliding_window_size if windows else None
        self.draft_swa_window = params.draft_swa_window
        word("policy", policy, tuple(BlockManager.policies()))
        word("objective", objective, ("cost", "balanced", "hits"))
        self.policy: str = policy
        self._objective: Literal["cost", "balanced", "hits"] = objective
        self.boundary = Boundary("the radix cache kvtrie", _LOG)
        self.misses = RequestMisses() if count_misses else None
        super().__init__(params)
        if self.misses is not None and self.metrics_collector is not None:
            self.misses.labels = dict(self.metrics_collector.labels)

    def reset(self) -> None:
        """Forget all; SGLang takes the pages back by itself."""
        super().reset()
        self.root_node = Path(np.empty(0, dtype=np.uint64), RadixKey(array("q")))
        self._empty_match_result = found(0, self.root_node)
        # Of one group the events are evictions; of several, all that comes and leaves.
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
        self._slots = BlockSlots(pools, self.token_to_kv_pool_allocator)
        self._locks = Locks(self.manager)
        self._published = PublishedPages(self.kv_events, self.page_size)

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """The longest prefix of whole pages that is there."""
        with self.boundary.contained():
            return self._match(params.key, params.req)
        return self._empty_match_result

    def _match(self, key: RadixKey, req: Any) -> MatchResult:  # noqa: ANN401 - SGLang's `Req`
        named = None if self.disable else tokens_of(key, self.page_size)
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
        return found(len(blocks) * self.page_size, Path(blocks, None, matched), known)

    def touch_prefix(self, key: RadixKey) -> None:
        """Note a use of what is there of a key."""
        with self.boundary.contained():
            named = None if self.disable else tokens_of(key, self.page_size)
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
        """Take in the pages of a key that are not there; how many tokens were."""
        with self.boundary.contained():
            return self._insert(params)
        return InsertResult(prefix_len=0, last_device_node=self.root_node)

    def _insert(self, params: InsertParams) -> InsertResult:
        key, value = params.key, params.value
        if self.disable or key is None or (named := tokens_of(key, self.page_size)) is None:
            return InsertResult(prefix_len=0, last_device_node=self.root_node)
        tokens, scope = named
        now, size = time.monotonic_ns(), self.page_size
        # Without values, SGLang's simulations take token ids for slots.
        slots = tokens if value is None else np.asarray(value[: len(tokens)].cpu())
        if len(slots) < len(tokens):
            raise ConfigError(f"{len(tokens)} tokens have {len(slots)} slots")
        slots = slots.astype(np.int64).reshape(-1, size)
        with self.manager.acquire(tokens, now=now, scope=scope, keep=0, load="none") as lease:
            there = lease.matched
            if self.pools.several:  # full attention may have more than can be gone on from
                there = self.manager.known(tokens, scope=scope)
            self._slots.check_room((len(tokens) - there) // size)
            # Nothing may fail from the commit on until the rows are entered.
            if lease.matched < len(tokens):
                new = lease.commit(tokens[lease.matched :], now=now).new.tolist()
                self._slots.enter(new, slots[len(slots) - len(new) :])
            blocks = lease.handles
            lease.release(now=now)
        if self.pools.several:
            self._keep_windows(blocks.tolist(), there // size, slots, params)
        with self.boundary.contained():
            self._published.stored(blocks.tolist(), there // size, key)
        return InsertResult(prefix_len=there, last_device_node=Path(blocks))

    def _keep_windows(
        self, blocks: list[int], there: int, slots: NDArray[np.int64], params: InsertParams
    ) -> None:
        """Bring the windows of a path in line with the slots that came, and free what it had.

        Args:
            blocks: the path.
            there: how many of them were there.
            slots: `(blocks, page_size)`, the slots that came; those of the tree up to
                `params.prev_prefix_len`.
            params: say how far the window of these slots has passed.
        """
        size, dead = self.page_size, params.get_evicted_seqlen(ComponentType.SWA)
        first = max(params.prev_prefix_len, 0) // size
        lives = range(max(first, -(-dead // size)), len(blocks))
        places = {block: place for place, block in enumerate(blocks)}
        events = self._events()
        self._settle(events)
        came = {block for stored, group, block in events if stored and group == WINDOWS}
        lost = [block for block in came if places[block] not in lives]
        if lost:
            self.manager.clear_copies(lost, "gpu", group=WINDOWS, now=time.monotonic_ns())
            came.difference_update(lost)
            self._settle(self._events())
        self._slots.renew(blocks, slots, came, (first, there), lives)

    def checkpoint(self, req: Any, *, up_to: int) -> None:  # noqa: ANN401 - SGLang's `Req`
        """Take in what a request has computed, unless its content cannot be cached."""
        if self.disable:
            return
        with self.boundary.contained():
            if self.misses is not None and isinstance(req.last_node, Path):
                self.misses.inserted(req.last_node.matched)
            ids = req.full_untruncated_fill_ids[:up_to]
            key = RadixKey(ids, req.extra_key, cache_salt=req.cache_salt)
            # SGLang inserts first and computes with the priority then.
            whole("priority", req.priority or 0, -_FAR, _FAR - 1)
            if tokens_of(key, self.page_size) is None:
                return
            if self.pools.several:
                self._checkpoint(req, ids)
            else:
                super().checkpoint(req, up_to=up_to)

    def _checkpoint(self, req: Any, ids: array[int]) -> None:  # noqa: ANN401 - SGLang's `Req`
        """Take in what a request has computed, with its windows, and lock the new path."""
        kv, size, branch = req.kv, self.page_size, req.swa_branching_seqlen
        protected = kv.cache_protected_len
        if branch is not None and protected < branch <= len(ids):
            ids = ids[:branch]
        end = len(ids) // size * size
        if end <= 0 or end < protected:
            return
        row = self.req_to_token_pool.req_to_token[kv.req_pool_idx, :end]
        params = InsertParams(
            key=RadixKey(ids[:end], req.extra_key, cache_salt=req.cache_salt),
            value=row.to(dtype=torch.int64, copy=True),
            prev_prefix_len=protected,
        )
        params.set_evicted_seqlen(ComponentType.SWA, kv.get_evicted_seqlen(ComponentType.SWA))
        path = self.insert(params).last_device_node
        slots = self.path_device_indices(path)
        if len(slots) < end:
            return
        self.req_to_token_pool.write((kv.req_pool_idx, slice(protected, end)), slots[protected:])
        self.unlock(req.lock)
        req.lock, req.last_node = self.lock(path), path
        kv.cache_protected_len = end
        kv.cache_inserted_len = max(kv.cache_inserted_len, end)
        if branch is not None and end >= branch // size * size:
            req.swa_branching_seqlen = None

    def evict(self, params: EvictParams) -> EvictResult:
        """Evict at least as many tokens of each pool as are asked for, unless they are locked."""
        begun, size = time.perf_counter(), self.page_size
        if self.disable:
            return EvictResult()
        freed: Counter[int] = Counter()
        for group, tokens in ((FULL, params.num_tokens), (WINDOWS, params.swa_num_tokens)):
            wanted = -(-tokens // size) - freed[group]
            count = min(wanted, self._count(group) - self._locks.count(group))
            if count > 0:
                freed.update(self._evict(group, count))
        self.update_eviction_metrics(freed[FULL] * size, begun)
        return EvictResult(
            num_tokens_evicted=freed[FULL] * size, swa_num_tokens_evicted=freed[WINDOWS] * size
        )

    def _evict(self, group: int, count: int) -> dict[int, int]:
        """Evict pages of a pool; pages that were freed, by group."""
        now = time.monotonic_ns()
        if self.pools.several:
            self.manager.evict(count, "gpu", now=now, group=group)
            return self._settle(self._events())
        free = self.manager.stats().tiers["gpu"].free
        # A request that reserves all free blocks, and as many more as should be evicted.
        with self.manager.acquire(np.zeros(1, np.uint32), now=now, load="none") as room:
            room.reserve((free + count) * self.page_size, now=now)
            room.release(now=now)
        return self._settle(self._events())

    def _events(self) -> list[tuple[bool, int, int]]:
        """Whether parts of blocks came, their group and block, since the last call."""
        events = self.manager.take_events()
        return [(event.kind == "stored", event.group, event.block) for event in events]

    def _settle(self, events: list[tuple[bool, int, int]]) -> dict[int, int]:
        """Free the pages of what has left the manager; how many, by group."""
        gone = [(group, block) for stored, group, block in events if not stored]
        freed = self._slots.left(gone)
        self._published.removed(block for group, block in gone if group == FULL)
        return freed

    def _count(self, group: int) -> int:
        """Blocks that have a page of a pool."""
        return len(self._slots.windows) if group == WINDOWS else len(self._slots)

    def inc_lock_ref(self, node: Path) -> IncLockRefResult:  # pyright: ignore[reportIncompatibleMethodOverride] - our nodes are paths
        """Keep a path from being evicted, and the window at its end."""
        if self.misses is not None and node.matched is not None:
            with self.boundary.contained():
                self.misses.locked(node.matched, len(node.blocks) * self.page_size)
        if self.disable or not len(node.blocks):
            return IncLockRefResult(delta=0)
        before, blocks = self._locks.count(FULL), node.blocks.tolist()
        last = blocks[-self.pools.window_blocks :] if self.pools.several else []
        windows = [block for block in last if block in self._slots.windows]
        node.locks.append(self._locks.take({FULL: blocks, WINDOWS: windows}))
        return IncLockRefResult(delta=(before - self._locks.count(FULL)) * self.page_size)

    def dec_lock_ref(  # pyright: ignore[reportIncompatibleMethodOverride] - as above
        self,
        node: Path,
        params: DecLockRefParams | None = None,  # noqa: ARG002
    ) -> DecLockRefResult:
        """Let go of a path once."""
        if self.disable or not node.locks:
            return DecLockRefResult(delta=0)
        before = self._locks.count(FULL)
        self._locks.give(node.locks.pop())
        return DecLockRefResult(delta=(before - self._locks.count(FULL)) * self.page_size)

    def release_swa_prefix_lock(self, req: Any) -> None:  # noqa: ANN401 - SGLang's `Req`
        """Let go of the window of a request's prefix, which its own window has passed."""
        lock: TreeLock | None = req.lock
        if lock is None or lock.swa_released:
            return
        lock.swa_released = True
        held = [each for each in lock.node.locks if WINDOWS in each.pins]
        if held:
            self._locks.give(held[-1], WINDOWS)

    def path_device_indices(self, node: Path) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride] - our nodes are paths
        """Token slots of a path, in order."""
        if not len(node.blocks):
            return self._empty_device_indices
        return self._slots.of(node.blocks.tolist()).to(self.device)

    def all_values_flatten(self) -> torch.Tensor:
        """Return the token slots of all blocks, in no order."""
        return self._slots.all()

    def supports_swa(self) -> bool:
        """Whether sliding windows have a pool of their own."""
        return self.pools.several

    def _evictable(self, group: int) -> int:
        return (self._count(group) - self._locks.count(group)) * self.page_size

    def evictable_size(self) -> int:
        """Tokens that could be given back."""
        return self._evictable(FULL)

    def protected_size(self) -> int:
        """Tokens that are locked."""
        return self._locks.count(FULL) * self.page_size

    full_evictable_size, full_protected_size = evictable_size, protected_size

    def swa_evictable_size(self) -> int:
        """Tokens whose windows could be given back."""
        return self._evictable(WINDOWS)

    def swa_protected_size(self) -> int:
        """Tokens whose windows are locked."""
        return self._locks.count(WINDOWS) * self.page_size

    def total_size(self) -> int:
        """Tokens that are there."""
        return len(self._slots) * self.page_size

    def sanity_check(self) -> None:
        """Compare the blocks that have pages with those of the manager, while nothing is locked.

        Raises:
            AssertionError: they differ, or a path is locked.
        """
        counted = self.manager.stats().tiers["gpu"].groups
        seen = [self._count(group) for group, _ in enumerate(counted)]
        known = [group.held + group.released for group in counted]
        locked = [self._locks.count(group) for group in (FULL, WINDOWS)]
        if seen != known or any(locked):
            raise AssertionError(f"{seen} blocks have pages, {known} are known, {locked} locked")

    def available_and_evictable_str(self) -> str:
        """What is free and what could be given back, for SGLang's messages."""
        allocator = self.token_to_kv_pool_allocator
        if not self.pools.several:
            return super().available_and_evictable_str()
        full, swa = allocator.full_available_size(), allocator.swa_available_size()
        return (
            f"Available full tokens: {full} and {self.evictable_size()} evictable\n"
            f"Available SWA tokens: {swa} and {self.swa_evictable_size()} evictable\n"
        )

    def dfs_weight_order(self, node_handles: Sequence[Path]) -> list[int]:
        """Requests in an order that has those of one beginning side by side."""
        paths = [handle.blocks.tolist() for handle in node_handles]
        return sorted(range(len(paths)), key=paths.__getitem__)

    def pretty_print(self) -> None:
        """Print how much is there."""
        print(f"#tokens: {self.total_size()}")  # noqa: T201 - what SGLang asks for
