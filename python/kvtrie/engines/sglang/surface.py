"""SGLang modules, classes, methods, properties and fields used by kvtrie."""

from __future__ import annotations

__all__ = ["CALLS", "ENGINE", "LOG", "NAMES", "OURS", "OVERRIDDEN", "USED", "VERSIONS"]

ENGINE: str = "SGLang"
LOG: str = "sglang.srt.kvtrie"
VERSIONS: tuple[str, ...] = ("0.5.23",)

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
        "full_evictable_size",
        "swa_evictable_size",
        "protected_size",
        "full_protected_size",
        "swa_protected_size",
        "supports_swa",
        "supports_mamba",
        "swa_retain_floor",
        "on_release",
        "available_and_evictable_str",
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
        "on_host_pools_registered",
        "batch_exists_v2",
        "batch_get_v2",
        "batch_set_v2",
        "clear",
    ),
}
"""Methods of kvtrie's classes called by SGLang, by base class."""

OURS: dict[tuple[str, str], tuple[str, str]] = {
    (f"{_CACHE}.radix_cache", "RadixCache"): ("kvtrie.engines.sglang.radix", "KvtrieRadixCache"),
    (_STORAGE, "HiCacheStorage"): ("kvtrie.engines.sglang.storage", "KvtrieHiCache"),
}
"""kvtrie's classes called by SGLang, by base class."""

USED: dict[tuple[str, str], tuple[str, ...]] = {
    **OVERRIDDEN,
    (f"{_CACHE}.radix_cache", "RadixCache"): (
        *OVERRIDDEN[f"{_CACHE}.radix_cache", "RadixCache"],
        "disable",
        "page_size",
        "device",
        "token_to_kv_pool_allocator",
        "req_to_token_pool",
        "root_node",
        "lock",
        "unlock",
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
        "sliding_window_size",
        "swa_retain_window",
        "draft_swa_window",
        "swa_gates_prefix_match",
        "decoder_swa_bounded_replay",
        "req_to_token_pool",
        "enable_mamba_extra_buffer",
        "enable_mamba_extra_buffer_lazy",
    ),
    (f"{_CACHE}.memory_pool", "ReqToTokenPool"): ("req_to_token", "write"),
    (f"{_CACHE}.memory_pool", "HybridReqToTokenPool"): ("mamba_allocator", "mamba_pool"),
    (f"{_CACHE}.allocator.mamba", "MambaSlotAllocator"): ("size", "available_size", "free"),
    (f"{_CACHE}.unified_cache.components.mamba", "MambaComponent"): (
        "__init__",
        "tree_core",
        "mamba_checkpoint_grid",
        "finalize_match_result_in_cache",
        "prepare_for_caching_req",
        "cleanup_after_caching_req",
    ),
    (f"{_CACHE}.allocator", "BaseTokenToKVPoolAllocator"): (
        "size",
        "available_size",
        "free_segment",
    ),
    (f"{_CACHE}.allocator.swa", "SWATokenToKVPoolAllocator"): (
        "size_full",
        "size_swa",
        "swa_req_ring",
        "full_available_size",
        "swa_available_size",
        "free_full_segment",
        "free_swa_segment",
        "translate_loc_from_full_to_swa",
        "clear_full_to_swa_mapping",
        "set_full_to_swa_mapping",
    ),
    (f"{_CACHE}.unified_cache.component_type", "ComponentType"): ("SWA",),
    (_BASE, "MatchPrefixParams"): ("key", "req"),
    (_BASE, "InsertParams"): (
        "__init__",
        "key",
        "value",
        "prev_prefix_len",
        "get_evicted_seqlen",
        "set_evicted_seqlen",
        "mamba_value",
    ),
    (_BASE, "EvictParams"): ("num_tokens", "swa_num_tokens", "mamba_num"),
    (_BASE, "TreeLock"): ("node", "swa_released"),
    (_BASE, "DecLockRefParams"): (),
    (_BASE, "MatchResult"): (
        "__init__",
        "device_prefix_len",
        "last_device_node",
        "last_host_node",
        "best_match_node",
        "full_kv_hit_length",
        "swa_branching_seqlen",
        "mamba_branching_seqlen",
        "_replace",
    ),
    (_BASE, "InsertResult"): ("__init__", "prefix_len", "last_device_node", "mamba_exist"),
    (_BASE, "EvictResult"): (
        "__init__",
        "num_tokens_evicted",
        "swa_num_tokens_evicted",
        "mamba_num_evicted",
    ),
    (_BASE, "IncLockRefResult"): ("__init__", "delta"),
    (_BASE, "DecLockRefResult"): ("__init__", "delta"),
    (f"{_CACHE}.registry", "TreeCacheBuildContext"): (
        "params",
        "is_hybrid_swa",
        "is_hybrid_ssm",
        "full_tokens_per_layer",
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
    (_STORAGE, "PoolName"): ("KV",),
    (_STORAGE, "PoolHitPolicy"): ("TRAILING_PAGES", "BLOCK_GROUPS"),
    (_STORAGE, "PoolTransfer"): ("__init__", "name", "host_indices", "keys", "hit_policy"),
    (_STORAGE, "PoolTransferResult"): ("__init__", "empty"),
    (f"{_CACHE}.pool_host.base", "HostKVCache"): (
        "layout",
        "page_size",
        "page_num",
        "get_data_page",
        "get_dummy_flat_data_page",
        "set_from_flat_data_page",
    ),
    ("sglang.srt.distributed.parallel_state", "GroupCoordinator"): ("world_size", "cpu_group"),
}

NAMES: tuple[tuple[str, str], ...] = (
    (f"{_CACHE}.registry", "get_radix_cache_factory"),
    (f"{_CACHE}.registry", "register_radix_cache_backend"),
    ("sglang.srt.distributed.parallel_state", "get_world_group"),
    ("sglang.srt.layers.radix_attention", "RadixAttention"),
    ("sglang.srt.runtime_context", "get_lora"),
    ("sglang.srt.runtime_context", "get_server_args"),
)
"""Functions and constants, by module."""

_MAMBA = f"{_CACHE}.unified_cache.components.mamba"
_SWA = f"{_CACHE}.allocator.swa"

CALLS: dict[tuple[str, str], dict[str, str]] = {
    (f"{_CACHE}.radix_cache", "RadixCache"): {
        "lock": "node",
        "unlock": "lock",
        "update_eviction_metrics": "num_evicted, start_time",
    },
    (_STORAGE, "HiCacheStorage"): {
        "register_mem_pool_host": "mem_pool_host",
        "register_mem_host_pool_v2": "host_pool, host_pool_name",
    },
    (f"{_CACHE}.radix_cache", "RadixKey"): {
        "__init__": "token_ids, extra_key, cache_salt=",
        "__getitem__": "idx",
        "raw_token_ids": "",
    },
    (f"{_CACHE}.events", "KVCacheEventRecorder"): {
        "record_store": "node",
        "record_remove": "node",
    },
    (f"{_CACHE}.memory_pool", "ReqToTokenPool"): {"write": "indices, values"},
    (f"{_CACHE}.allocator.mamba", "MambaSlotAllocator"): {
        "available_size": "",
        "free": "free_index",
    },
    (_MAMBA, "MambaComponent"): {
        "__init__": "cache, params",
        "finalize_match_result_in_cache": "params, result",
        "prepare_for_caching_req": "req, insert_params, token_ids_len, is_finished",
        "cleanup_after_caching_req": "req, is_finished, insert_result, insert_params",
    },
    (f"{_CACHE}.allocator", "BaseTokenToKVPoolAllocator"): {
        "available_size": "",
        "free_segment": "free_index, start_pos=",
    },
    (_SWA, "SWATokenToKVPoolAllocator"): {
        "full_available_size": "",
        "swa_available_size": "",
        "free_full_segment": "free_index, start_pos=",
        "free_swa_segment": "free_index, start_pos=",
        "translate_loc_from_full_to_swa": "kv_indices",
        "clear_full_to_swa_mapping": "full_indices",
        "set_full_to_swa_mapping": "full_indices, swa_indices",
    },
    (_BASE, "InsertParams"): {
        "__init__": "prev_prefix_len=",
        "get_evicted_seqlen": "component_type",
        "set_evicted_seqlen": "component_type, length",
    },
    (_BASE, "MatchResult"): {
        "__init__": "device_prefix_len=, last_device_node=, last_host_node=, best_match_node=",
        "_replace": "swa_branching_seqlen=",
    },
    (_BASE, "InsertResult"): {"__init__": "prefix_len=, last_device_node="},
    (_BASE, "EvictResult"): {
        "__init__": "num_tokens_evicted=, swa_num_tokens_evicted=, mamba_num_evicted="
    },
    (_BASE, "IncLockRefResult"): {"__init__": "delta="},
    (_BASE, "DecLockRefResult"): {"__init__": "delta="},
    (_STORAGE, "PoolTransfer"): {"__init__": "name, host_indices, keys="},
    (_STORAGE, "PoolTransferResult"): {
        "__init__": "kv_hit_pages, extra_pool_hit_pages, restorable_prefix_pages",
        "empty": "",
    },
    (f"{_CACHE}.pool_host.base", "HostKVCache"): {
        "get_data_page": "index, flat=",
        "get_dummy_flat_data_page": "",
        "set_from_flat_data_page": "index, data_page",
    },
    (f"{_CACHE}.registry", ""): {
        "get_radix_cache_factory": "name",
        "register_radix_cache_backend": "name, factory",
    },
    ("sglang.srt.distributed.parallel_state", ""): {"get_world_group": ""},
    ("sglang.srt.runtime_context", ""): {"get_lora": "", "get_server_args": ""},
}
"""Arguments passed by kvtrie, by module and class, for `kvtrie.engines.server.signatures`."""
