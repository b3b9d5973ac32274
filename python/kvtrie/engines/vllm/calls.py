"""All calls between kvtrie and vLLM, with their arguments.

`surface` has the names.

`CALLS` has kvtrie's arguments by module and class ("" for functions of a module), in the format of
`signatures.given`. `OURS` has the subclasses in kvtrie, by their base class in vLLM. vLLM calls
their methods.
"""

from __future__ import annotations

__all__ = ["CALLS", "OURS"]

_V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
_OFFLOAD = "vllm.v1.kv_offload"
_MINE = "kvtrie.engines.vllm."
_NAMED = "name, module_path, class_name"

OURS: dict[tuple[str, str], tuple[str, str]] = {
    (f"{_V1}.base", "KVConnectorBase_V1"): (_MINE + "connector", "KvtrieConnector"),
    (f"{_V1}.base", "SupportsHMA"): (_MINE + "connector", "KvtrieConnector"),
    (f"{_V1}.base", "KVConnectorWorkerMetadata"): (_MINE + "connector", "_News"),
    (f"{_V1}.metrics", "KVConnectorStats"): (_MINE + "vllm_metrics", "KvtrieStats"),
    (f"{_V1}.metrics", "KVConnectorPromMetrics"): (_MINE + "vllm_metrics", "KvtrieProm"),
    (f"{_OFFLOAD}.base", "OffloadingWorker"): (_MINE + "offloading", "NamedWorker"),
    (f"{_OFFLOAD}.cpu.policies.base", "CachePolicy"): (
        _MINE + "cache_policy",
        "KvtrieCachePolicy",
    ),
    (f"{_OFFLOAD}.tiering.base", "SecondaryTierManager"): (_MINE + "disk_tier", "KvtrieDiskTier"),
    (f"{_OFFLOAD}.tiering.spec", "TieringOffloadingSpec"): (
        _MINE + "offloading",
        "KvtrieOffloadingSpec",
    ),
}

CALLS: dict[tuple[str, str], dict[str, str]] = {
    (f"{_V1}.base", "KVConnectorBase_V1"): {
        "__init__": "vllm_config, role, kv_cache_config",
        "bind_connector_metadata": "connector_metadata",
        "_get_connector_metadata": "",
    },
    (f"{_V1}.base", "KVConnectorTransferResults"): {
        "__init__": "finished_recving=, failed_recving="
    },
    (f"{_V1}.metrics", "KVConnectorStats"): {"__init__": "data"},
    (f"{_V1}.metrics", "KVConnectorPromMetrics"): {
        "__init__": "vllm_config, metric_types, labelnames, per_engine_labelvalues"
    },
    (f"{_V1}.offloading.metrics", "OffloadingConnectorStats"): {
        "__init__": "",
        "increase_counter": "counter_name, counter_increase_value",
    },
    ("vllm.distributed.kv_transfer.kv_connector.factory", "KVConnectorFactory"): {
        "register_connector": _NAMED
    },
    ("vllm.distributed.kv_events", "BlockStored"): {
        "__init__": "block_hashes=, parent_block_hash=, token_ids=, block_size=, lora_id=, medium=,"
        " lora_name=, extra_keys=, group_idx=, kv_cache_spec_kind=, kv_cache_spec_sliding_window="
    },
    ("vllm.distributed.kv_events", "BlockRemoved"): {
        "__init__": "block_hashes=, medium=, group_idx="
    },
    ("vllm.distributed.parallel_state", ""): {"get_pp_group": "", "get_tp_group": ""},
    (f"{_OFFLOAD}.base", "ReqContext"): {
        "get_state": "cls",
        "set_state": "val",
        "get_offload_key_position": "key",
    },
    (f"{_OFFLOAD}.base", "OffloadingEvent"): {"__init__": "keys, medium, removed="},
    (f"{_OFFLOAD}.base", "OffloadingWorker"): {
        "submit_store": "job_id, src_spec, dst_spec",
        "submit_load": "job_id, src_spec, dst_spec",
        "get_finished": "",
        "wait": "job_ids",
        "shutdown": "",
    },
    (f"{_OFFLOAD}.base", "TransferResult"): {"__init__": "job_id, success="},
    (f"{_OFFLOAD}.base", "OffloadingManager"): {"get_stats": ""},
    (f"{_OFFLOAD}.base", "OffloadingCounterMetadata"): {"__init__": "documentation="},
    (f"{_OFFLOAD}.factory", "OffloadingSpecFactory"): {"register_spec": _NAMED},
    (f"{_OFFLOAD}.cpu.policies.base", "CachePolicy"): {"__init__": "cache_capacity"},
    (f"{_OFFLOAD}.cpu.policies.factory", "CachePolicyFactory"): {"register_cache_policy": _NAMED},
    (f"{_OFFLOAD}.cpu.shared_offload_region", "SharedOffloadRegion"): {
        "__init__": "engine_id=, num_chunks=, rank=, kv_bytes_per_chunk=, cpu_page_size=",
        "create_next_worker_view": "tensor_page_size",
        "cleanup": "",
    },
    (f"{_OFFLOAD}.tiering.base", "SecondaryTierManager"): {
        "__init__": "offloading_spec, primary_kv_view, tier_type, backpressure_detector"
    },
    (f"{_OFFLOAD}.tiering.base", "JobResult"): {
        "__init__": "job_id, success=, successful_keys=, transfer_time=, transfer_bytes="
    },
    (f"{_OFFLOAD}.tiering.factory", "SecondaryTierFactory"): {
        "register_tier": "tier_type, module_path, class_name"
    },
    (f"{_OFFLOAD}.tiering.manager", "TieringOffloadingManager"): {"get_stats": ""},
    (f"{_OFFLOAD}.tiering.spec", "TieringOffloadingSpec"): {
        "__init__": "config",
        "get_manager": "",
        "get_worker": "kv_caches",
        "build_metric_definitions": "extra_config",
    },
    ("vllm.v1.request", "Request"): {"from_engine_core_request": "request, block_hasher"},
    ("vllm.multimodal.inputs", "MultiModalKwargsItem"): {"get_data": ""},
    ("vllm.lora.worker_manager", "WorkerLoRAManager"): {"add_adapter": "adapter_request"},
    ("vllm.lora.model_manager", "LoRAModelManager"): {"list_adapters": ""},
    ("vllm.platforms.interface", "Platform"): {"is_cpu": ""},
    ("vllm.v1.core.kv_cache_manager", "KVCacheBlocks"): {"get_block_ids": ""},
    ("vllm.v1.attention.backend", "AttentionBackend"): {"get_name": ""},
    ("vllm.v1.attention.backends.cpu_attn", "CPUAttentionBackendImpl"): {
        "do_kv_cache_update": "layer, key, value, kv_cache, slot_mapping"
    },
    ("vllm.utils.hashing", ""): {"get_hash_fn_by_name": "hash_fn_name"},
    ("vllm.v1.core.kv_cache_utils", ""): {
        "generate_block_hash_extra_keys": "request, start_token_idx, end_token_idx, start_mm_idx",
        "hash_block_tokens": "hash_function, parent_block_hash, curr_block_token_ids",
        "maybe_convert_block_hash": "hash_bytes",
        "to_event_extra_keys": "extra_keys",
    },
    ("vllm.v1.kv_cache_interface", ""): {
        "get_kv_cache_spec_kind": "kv_cache_spec",
        "get_kv_cache_spec_sliding_window": "kv_cache_spec",
    },
    ("vllm.config", ""): {"get_current_vllm_config": ""},
}
