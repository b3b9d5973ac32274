"""KvtrieRadixCache: kvtrie's trie in place of SGLang's radix tree. A page is a block.

SGLang owns the pages and passes the token slots of each new block; the manager knows the blocks and
chooses which of them are evicted, and its own slots are only counted.
Invariant: a block keeps its token slots until it is evicted; a locked path is never evicted.
Cost: a lookup per match, a request of the manager per insert, a reservation per eviction; 8 B per
token of the pool.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    DecLockRefResult,
    EvictResult,
    IncLockRefResult,
    InsertResult,
    MatchResult,
)
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

from kvtrie import BlockManager, ModelShape, Tier
from kvtrie.engines.server.boundary import Boundary
from kvtrie.engines.server.startup import OpenTier, log_startup, startup_line, startup_warnings
from kvtrie.engines.sglang.events import PublishedPages
from kvtrie.engines.sglang.misses import Matched, RequestMisses
from kvtrie.errors import ConfigError
from kvtrie.settings.argument import shown, text, whole, word
from kvtrie.settings.scope import Scope
from kvtrie.settings.tier import DEFAULT_POLICY

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from sglang.srt.mem_cache.base_prefix_cache import (
        DecLockRefParams,
        EvictParams,
        InsertParams,
        MatchPrefixParams,
    )
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext

__all__ = ["KvtrieRadixCache", "Path"]

_LOG = logging.getLogger("sglang.srt.kvtrie")  # whose lines SGLang shows
_MOST_TOKEN = 2**32
_FAR = 2**63
_KEYS = ("policy", "objective")


class Path:
    """Blocks from the root on: what SGLang holds as a node.

    Args:
        blocks: handles of the blocks, in order.
        key: tokens; the root's are empty, other paths do not keep theirs.
        matched: the request whose match gave the path, if its tokens are to be counted.
    """

    __slots__ = ("blocks", "key", "locks", "matched")

    def __init__(
        self,
        blocks: NDArray[np.uint64],
        key: RadixKey | None = None,
        matched: Matched | None = None,
    ) -> None:
        self.blocks = blocks
        self.key = key
        self.matched = matched
        self.locks: list[int] = []


class KvtrieRadixCache(RadixCache):
    """SGLang's prefix cache over a `BlockManager`.

    Args:
        params: SGLang's `CacheInitParams`.
        blocks: pages of the KV pool; None asks the allocator.
        policy: which blocks are evicted first.
        objective: what policies by value save: the "cost" of computing blocks again, or "hits".
        count_misses: count computed prompt tokens by cause, and export them to Prometheus.

    Attributes:
        misses: counts computed prompt tokens; None if they are not counted.

    Raises:
        ConfigError: what the cache does not serve: speculative decoding by EAGLE, sliding windows,
            state layers, hierarchical caches; a pool of less than a page.
    """

    def __init__(
        self,
        params: CacheInitParams,
        *,
        blocks: int | None = None,
        policy: str = DEFAULT_POLICY,
        objective: Literal["cost", "balanced", "hits"] = "cost",
        count_misses: bool = False,
    ) -> None:
        if params.is_eagle:
            raise ConfigError("kvtrie keeps plain tokens: EAGLE's pairs are not supported")
        allocator = params.token_to_kv_pool_allocator
        self._blocks = blocks or int(allocator.size) // int(params.page_size)
        if self._blocks < 1:
            raise ConfigError(
                f"SGLang's KV pool has {allocator.size} tokens, at least a page of "
                f"{params.page_size} wanted"
            )
        word("policy", policy, tuple(BlockManager.policies()))
        word("objective", objective, ("cost", "balanced", "hits"))
        self._policy: str = policy
        self._objective: Literal["cost", "balanced", "hits"] = objective
        self.boundary = Boundary("the radix cache kvtrie", _LOG)
        self.misses = RequestMisses() if count_misses else None
        super().__init__(params)
        if self.misses is not None and self.metrics_collector is not None:
            self.misses.labels = dict(self.metrics_collector.labels)

    @classmethod
    def of(cls, context: TreeCacheBuildContext) -> KvtrieRadixCache:
        """The cache of a server.

        Raises:
            ConfigError: a model or a setting that the cache does not serve.
        """
        for what, present in (
            ("sliding windows", context.is_hybrid_swa),
            ("state layers", context.is_hybrid_ssm),
            ("hierarchical caches", context.enable_hierarchical_cache),
        ):
            if present:
                raise ConfigError(f"--radix-cache-backend kvtrie does not serve {what}")
        given = dict(context.params.eviction_policy_config or {})
        strange = [shown(key) for key in given if key not in _KEYS]
        if strange:
            raise ConfigError(
                f"--radix-eviction-policy-config has no {', '.join(strange)}: {', '.join(_KEYS)} "
                "are what it may have"
            )
        # SGLang's own policy is not asked, and would refuse these keys.
        params = replace(context.params, eviction_policy_config=None)
        first = not context.tp_rank and not params.pp_rank
        made = cls(params, count_misses=first and params.enable_metrics, **given)
        if first:
            made.log_start(context.tp_size)
        return made

    def log_start(self, ranks: int) -> None:
        """Log the cache of a server once, as its first rank has it."""
        gpu = [OpenTier("gpu", 0, self._blocks)]
        line = startup_line(gpu, block_tokens=self.page_size, ranks=ranks, policy=self._policy)
        log_startup(_LOG, line, startup_warnings(gpu))

    def reset(self) -> None:
        """Forget all; SGLang takes the pages back by itself."""
        super().reset()
        self.root_node = Path(np.empty(0, dtype=np.uint64), RadixKey(array("q")))
        self._empty_match_result = _found(0, self.root_node)
        # Only numbers of tokens and blocks matter here: the bytes are SGLang's.
        shape = ModelShape(layers=1, kv_heads=1, head_dim=16)
        self.manager = BlockManager(
            shape,
            [Tier("gpu", blocks=self._blocks)],
            block_tokens=self.page_size,
            policy=self._policy,
            objective=self._objective,
            events=self._blocks + 1,
            explain=self.misses is not None,
        )
        if self.misses is not None:
            self.misses.use(self.manager)
        # Token slots by row, the row of each block, and rows without a block.
        self._slots = np.empty((self._blocks, self.page_size), dtype=np.int64)
        self._rows: dict[int, int] = {}
        self._free = list(range(self._blocks))
        self._locked: Counter[int] = Counter()
        self._published = PublishedPages(self.kv_events, self.page_size)

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """The longest prefix of whole pages that is there."""
        with self.boundary.contained():
            return self._match(params.key, params.req)
        return self._empty_match_result

    def _match(self, key: RadixKey, req: Any) -> MatchResult:  # noqa: ANN401 - SGLang's `Req`
        named = None if self.disable else self._tokens(key)
        matched = None
        if self.misses is not None and req is not None and not req.output_ids:
            matched = Matched(req.rid, key, None if named is None else named[1])
        blocks = self.root_node.blocks
        if named is not None:
            tokens, scope = named
            match = self.manager.lookup(tokens, now=time.monotonic_ns(), scope=scope, keep=0)
            blocks = match.handles[: match.tokens // self.page_size]
        if len(blocks):
            self._published.split(int(blocks[-1]))
        elif matched is None:
            return self._empty_match_result
        return _found(len(blocks) * self.page_size, Path(blocks, None, matched))

    def touch_prefix(self, key: RadixKey) -> None:
        """Note a use of what is there of a key."""
        with self.boundary.contained():
            named = None if self.disable else self._tokens(key)
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
            return self._insert(params.key, params.value)
        return InsertResult(prefix_len=0, last_device_node=self.root_node)

    def _insert(self, key: RadixKey | None, value: torch.Tensor | None) -> InsertResult:
        if self.disable or key is None or (named := self._tokens(key)) is None:
            return InsertResult(prefix_len=0, last_device_node=self.root_node)
        tokens, scope = named
        now, size = time.monotonic_ns(), self.page_size
        # Without values, SGLang's simulations take token ids for slots.
        slots = tokens if value is None else np.asarray(value[: len(tokens)].cpu())
        if len(slots) < len(tokens):
            raise ConfigError(f"{len(tokens)} tokens have {len(slots)} slots")
        with self.manager.acquire(tokens, now=now, scope=scope, keep=0, load="none") as lease:
            there = lease.matched
            count = (len(tokens) - there) // size
            if count > len(self._free):
                raise ConfigError(
                    f"{count} new pages, {len(self._free)} of {self._blocks} are free"
                )
            # Nothing may fail from the commit on until the rows are entered.
            slots = slots[there:].astype(np.int64).reshape(-1, size)
            if count:
                new = lease.commit(tokens[there:], now=now).new.tolist()
                rows = [self._free.pop() for _ in new]
                self._slots[rows] = slots
                self._rows.update(zip(new, rows, strict=True))
            blocks = lease.handles
            lease.release(now=now)
        with self.boundary.contained():
            self._published.stored(blocks.tolist(), there // size, key)
        return InsertResult(prefix_len=there, last_device_node=Path(blocks))

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
            if self._tokens(key) is not None:
                super().checkpoint(req, up_to=up_to)

    def evict(self, params: EvictParams) -> EvictResult:
        """Evict at least `params.num_tokens` tokens, as far as they are not locked."""
        begun, size = time.perf_counter(), self.page_size
        count = min(-(-params.num_tokens // size), len(self._rows) - len(self._locked))
        if self.disable or count <= 0:
            return EvictResult()
        now = time.monotonic_ns()
        free = self.manager.stats().tiers["gpu"].free
        # A request that reserves all free blocks, and as many more as should be evicted.
        with self.manager.acquire(np.zeros(1, np.uint32), now=now, load="none") as room:
            room.reserve((free + count) * size, now=now)
            room.release(now=now)
        gone = [event.block for event in self.manager.take_events()]
        rows = [self._rows.pop(block) for block in gone]
        self.token_to_kv_pool_allocator.free_segment(self._slots_of(rows), start_pos=0)
        self._free.extend(rows)
        self._published.removed(gone)
        self.update_eviction_metrics(len(gone) * size, begun)
        return EvictResult(num_tokens_evicted=len(gone) * size)

    def inc_lock_ref(self, node: Path) -> IncLockRefResult:  # pyright: ignore[reportIncompatibleMethodOverride] - our nodes are paths
        """Keep a path from being evicted."""
        if self.misses is not None and node.matched is not None:
            with self.boundary.contained():
                self.misses.locked(node.matched, len(node.blocks) * self.page_size)
        if self.disable or not len(node.blocks):
            return IncLockRefResult(delta=0)
        before = len(self._locked)
        node.locks.append(self.manager.pin_copies(node.blocks, 0, now=time.monotonic_ns()))
        self._locked.update(node.blocks.tolist())
        return IncLockRefResult(delta=(before - len(self._locked)) * self.page_size)

    def dec_lock_ref(  # pyright: ignore[reportIncompatibleMethodOverride] - as above
        self,
        node: Path,
        params: DecLockRefParams | None = None,  # noqa: ARG002
    ) -> DecLockRefResult:
        """Let go of a path once."""
        if self.disable or not node.locks:
            return DecLockRefResult(delta=0)
        before = len(self._locked)
        self.manager.unpin_copies(node.locks.pop(), now=time.monotonic_ns())
        for block in node.blocks.tolist():
            self._locked[block] -= 1
            if not self._locked[block]:
                del self._locked[block]
        return DecLockRefResult(delta=(before - len(self._locked)) * self.page_size)

    def path_device_indices(self, node: Path) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride] - our nodes are paths
        """Token slots of a path, in order."""
        if not len(node.blocks):
            return self._empty_device_indices
        rows = [self._rows[block] for block in node.blocks.tolist()]
        return self._slots_of(rows).to(self.device)

    def all_values_flatten(self) -> torch.Tensor:
        """Return the token slots of all blocks, in no order."""
        return self._slots_of(list(self._rows.values()))

    def evictable_size(self) -> int:
        """Tokens that could be given back."""
        return (len(self._rows) - len(self._locked)) * self.page_size

    def protected_size(self) -> int:
        """Tokens that are locked."""
        return len(self._locked) * self.page_size

    def total_size(self) -> int:
        """Tokens that are there."""
        return len(self._rows) * self.page_size

    def dfs_weight_order(self, node_handles: Sequence[Path]) -> list[int]:
        """Requests in an order that has those of one beginning side by side."""
        paths = [handle.blocks.tolist() for handle in node_handles]
        return sorted(range(len(paths)), key=paths.__getitem__)

    def pretty_print(self) -> None:
        """Print how much is there."""
        print(f"#tokens: {self.total_size()}")  # noqa: T201 - what SGLang asks for

    def _tokens(self, key: RadixKey) -> tuple[NDArray[np.uint32], Scope] | None:
        """Return the whole pages of a key and their scope; None if there are none.

        Ids beyond 32 bits, which SGLang makes of images, have no place in the trie: such a key
        neither matches nor is kept.

        Raises:
            ConfigError: a salt or an extra key that is no scope.
        """
        raw = np.asarray(key.raw_token_ids(), dtype=np.int64)
        raw = raw[: len(raw) // self.page_size * self.page_size]
        if not len(raw) or raw.min() < 0 or raw.max() >= _MOST_TOKEN:
            return None
        # An empty name is no name for SGLang, and anything else that is no str is refused.
        salt, extra = (
            "" if given is None else text(name, given)
            for name, given in (("cache_salt", key.cache_salt), ("extra_key", key.extra_key))
        )
        return raw.astype(np.uint32), Scope(tenant=salt.encode(), lora=extra)

    def _slots_of(self, rows: list[int]) -> torch.Tensor:
        return torch.from_numpy(self._slots[rows].reshape(-1))  # pyright: ignore[reportUnknownMemberType] - torch's


def _found(tokens: int, path: Path) -> MatchResult:
    return MatchResult(
        device_prefix_len=tokens,
        last_device_node=path,
        last_host_node=path,
        best_match_node=path,
    )
