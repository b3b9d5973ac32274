# Written by tests/served/stubs.py out of the installed package: do not edit.

from collections.abc import Sequence
from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import DecLockRefParams
from sglang.srt.mem_cache.base_prefix_cache import DecLockRefResult
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.base_prefix_cache import EvictResult
from sglang.srt.mem_cache.base_prefix_cache import IncLockRefResult
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.base_prefix_cache import InsertResult
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.base_prefix_cache import MatchResult
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.events import KVCacheEventRecorder
from typing import Any
import torch

class RadixCache:
    def __init__(self, params: CacheInitParams) -> None: ...
    def reset(self) -> Any: ...
    def match_prefix(self, params: MatchPrefixParams) -> MatchResult: ...
    def touch_prefix(self, key: RadixKey) -> None: ...
    def insert(self, params: InsertParams) -> InsertResult: ...
    def checkpoint(self, req: Any, *, up_to: int) -> Any: ...
    def evict(self, params: EvictParams) -> EvictResult: ...
    def inc_lock_ref(self, node: TreeNode) -> IncLockRefResult: ...
    def dec_lock_ref(
        self,
        node: TreeNode,
        params: DecLockRefParams | None = ...,
    ) -> DecLockRefResult: ...
    def path_device_indices(self, node: TreeNode) -> torch.Tensor: ...
    def evictable_size(self) -> Any: ...
    def protected_size(self) -> Any: ...
    def total_size(self) -> Any: ...
    def dfs_weight_order(self, node_handles: Sequence[Any]) -> list[int]: ...
    def all_values_flatten(self) -> Any: ...
    def pretty_print(self) -> Any: ...
    disable: bool
    page_size: int
    device: Any
    token_to_kv_pool_allocator: BaseTokenToKVPoolAllocator
    root_node: Any
    kv_events: KVCacheEventRecorder | None
    def update_eviction_metrics(self, num_evicted: int, start_time: float) -> Any: ...
    metrics_collector: Any | None
    _empty_device_indices: Any
    _empty_match_result: Any

class RadixKey:
    def __init__(
        self,
        token_ids: Any,
        extra_key: str | None = ...,
        is_bigram: bool = ...,
        limit: int | None = ...,
        cache_salt: str | None = ...,
    ) -> None: ...
    def __getitem__(self, idx: int | Any) -> RadixKey: ...
    def raw_token_ids(self) -> Any: ...
    token_ids: Any
    extra_key: str | None
    cache_salt: Any

class TreeNode:
    key: RadixKey
    parent: TreeNode
    hash_value: list[str] | None
    event_hash_value: list[str] | None
