"""All that kvtrie uses of SGLang: module, class, and its methods, properties and fields."""

from __future__ import annotations

_CACHE = "sglang.srt.mem_cache"
_BASE = f"{_CACHE}.base_prefix_cache"
_STORAGE = f"{_CACHE}.hicache_storage"

OVERRIDDEN = {
    (f"{_CACHE}.radix_cache", "RadixCache"): (
        "__init__",
        "reset",
        "match_prefix",
        "touch_prefix",
        "insert",
        "checkpoint",
        "evict",
        "inc_lock_ref",
        "dec_lock_ref",
        "path_device_indices",
        "evictable_size",
        "protected_size",
        "total_size",
        "dfs_weight_order",
        "all_values_flatten",
        "pretty_print",
    ),
    (_STORAGE, "HiCacheStorage"): (
        "__init__",
        "register_mem_pool_host",
        "register_mem_host_pool_v2",
        "exists",
        "batch_exists",
        "get",
        "batch_get",
        "set",
        "batch_set",
        "batch_get_v1",
        "batch_set_v1",
        "clear",
    ),
}
"""Methods of our classes that SGLang calls, by the base that has them."""

USED = {
    **OVERRIDDEN,
    (f"{_CACHE}.radix_cache", "RadixCache"): (
        *OVERRIDDEN[f"{_CACHE}.radix_cache", "RadixCache"],
        "disable",
        "page_size",
        "device",
        "token_to_kv_pool_allocator",
        "root_node",
        "kv_events",
        "update_eviction_metrics",
        "metrics_collector",
        "_empty_device_indices",
        "_empty_match_result",
    ),
    (_STORAGE, "HiCacheStorage"): (*OVERRIDDEN[_STORAGE, "HiCacheStorage"], "mem_pool_host"),
    (f"{_CACHE}.radix_cache", "RadixKey"): (
        "__init__",
        "__getitem__",
        "raw_token_ids",
        "token_ids",
        "extra_key",
        "cache_salt",
    ),
    (f"{_CACHE}.radix_cache", "TreeNode"): ("key", "parent", "hash_value", "event_hash_value"),
    (f"{_CACHE}.events", "KVCacheEventRecorder"): ("enabled", "record_store", "record_remove"),
    (f"{_CACHE}.cache_init_params", "CacheInitParams"): (
        "is_eagle",
        "page_size",
        "eviction_policy_config",
        "enable_metrics",
        "token_to_kv_pool_allocator",
        "pp_rank",
    ),
    (f"{_CACHE}.allocator", "BaseTokenToKVPoolAllocator"): ("size", "free_segment"),
    (_BASE, "MatchPrefixParams"): ("key", "req"),
    (_BASE, "InsertParams"): ("key", "value"),
    (_BASE, "EvictParams"): ("num_tokens",),
    (_BASE, "DecLockRefParams"): (),
    (_BASE, "MatchResult"): (
        "__init__",
        "device_prefix_len",
        "last_device_node",
        "last_host_node",
        "best_match_node",
    ),
    (_BASE, "InsertResult"): ("__init__", "prefix_len", "last_device_node"),
    (_BASE, "EvictResult"): ("__init__", "num_tokens_evicted"),
    (_BASE, "IncLockRefResult"): ("__init__", "delta"),
    (_BASE, "DecLockRefResult"): ("__init__", "delta"),
    (f"{_CACHE}.registry", "TreeCacheBuildContext"): (
        "params",
        "is_hybrid_swa",
        "is_hybrid_ssm",
        "enable_hierarchical_cache",
        "tp_size",
        "tp_rank",
    ),
    (_STORAGE, "HiCacheStorageConfig"): (
        "is_mla_model",
        "extra_config",
        "tp_rank",
        "tp_size",
        "pp_rank",
        "pp_size",
        "attn_cp_rank",
        "attn_cp_size",
    ),
    (_STORAGE, "HiCacheStorageExtraInfo"): ("prefix_keys",),
    (f"{_CACHE}.pool_host.base", "HostKVCache"): (
        "layout",
        "page_size",
        "get_data_page",
        "get_dummy_flat_data_page",
        "set_from_flat_data_page",
    ),
    ("sglang.srt.distributed.parallel_state", "GroupCoordinator"): ("world_size", "cpu_group"),
}

NAMES = (
    (f"{_CACHE}.registry", "get_radix_cache_factory"),
    (f"{_CACHE}.registry", "register_radix_cache_backend"),
    ("sglang.srt.distributed.parallel_state", "get_world_group"),
    ("sglang.srt.layers.radix_attention", "RadixAttention"),
    ("sglang.srt.runtime_context", "get_lora"),
    ("sglang.srt.runtime_context", "get_server_args"),
)
"""Functions and constants, by module."""
