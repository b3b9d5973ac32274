"""All that kvtrie uses of vLLM: module, class, and its methods, properties and fields.

`VERSIONS` are the versions of vLLM that kvtrie is tested with; `SINCE` has the names that an
earlier one of them lacks or calls otherwise, and that kvtrie does without there. `calls` has the
arguments of calls.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

from kvtrie.engines.server.signatures import refused_calls, refused_overrides
from kvtrie.engines.vllm.calls import CALLS, OURS

__all__ = [
    "NAMES",
    "OVERRIDDEN",
    "SINCE",
    "USED",
    "VERSIONS",
    "members",
    "missing_names",
    "refused_signatures",
]

VERSIONS = ("0.30", "0.31", "0.32", "0.33")

_V1 = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_EVENTS = "vllm.distributed.kv_events"
_OFFLOAD = "vllm.v1.kv_offload"
_OUTPUT = "vllm.v1.core.sched.output"

OVERRIDDEN = (
    "requires_kv_delivery",
    "requires_piecewise_for_cudagraph",
    "set_xfer_handshake_metadata_pp_aware",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "get_external_cache_hit_sources",
    "build_connector_meta",
    "update_connector_output",
    "get_loaded_kv_cache_group_ids",
    "get_transfer_results",
    "has_pending_push_work",
    "reset_cache",
    "take_events",
    "bind_gpu_block_pool",
    "get_kv_connector_stats",
    "build_kv_connector_stats",
    "build_prom_metrics",
    "register_kv_caches",
    "unregister_kv_caches",
    "get_handshake_metadata",
    "handle_preemptions",
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_block_ids_with_load_errors",
    "build_connector_worker_meta",
    "shutdown",
)
"""Methods of the connector that vLLM calls."""

USED = {
    (_V1, "KVConnectorBase_V1"): (
        "__init__",
        *OVERRIDDEN,
        "_get_connector_metadata",
        "_kv_transfer_config",
        "_vllm_config",
    ),
    (_V1, "SupportsHMA"): ("request_finished_all_groups",),
    (_V1, "KVConnectorTransferResults"): ("__init__", "finished_recving", "failed_recving"),
    (_V1, "KVConnectorMetadata"): (),
    (_V1, "KVConnectorHandshakeMetadata"): (),
    (_V1, "KVConnectorWorkerMetadata"): ("aggregate",),
    ("vllm.distributed.kv_transfer.kv_connector.factory", "KVConnectorFactory"): (
        "register_connector",
    ),
    ("vllm.distributed.parallel_state", "GroupCoordinator"): (
        "rank_in_group",
        "world_size",
        "cpu_group",
    ),
    ("vllm.v1.metrics.cache_hit_source", "CacheHitSource"): (
        "HOST",
        "DISK",
        "EXTERNAL_UNSPECIFIED",
    ),
    ("vllm.distributed.kv_transfer.kv_connector.v1.metrics", "KVConnectorStats"): (
        "__init__",
        "data",
        "reset",
        "aggregate",
        "reduce",
        "is_empty",
    ),
    ("vllm.distributed.kv_transfer.kv_connector.v1.metrics", "KVConnectorPromMetrics"): (
        "__init__",
        "observe",
        "per_engine_labelvalues",
    ),
    (_EVENTS, "BlockStored"): (
        "__init__",
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "lora_name",
        "medium",
        "extra_keys",
        "group_idx",
        "kv_cache_spec_kind",
        "kv_cache_spec_sliding_window",
    ),
    (_EVENTS, "BlockRemoved"): ("__init__", "block_hashes", "medium", "group_idx"),
    (f"{_OFFLOAD}.base", "ReqContext"): (
        "req_id",
        "kv_transfer_params",
        "kv_hints",
        "get_state",
        "set_state",
        "get_offload_key_position",
    ),
    (f"{_OFFLOAD}.base", "OffloadingEvent"): ("__init__", "keys", "medium", "removed", "locality"),
    (f"{_OFFLOAD}.base", "OffloadingWorker"): (
        "submit_store",
        "submit_load",
        "get_finished",
        "wait",
        "shutdown",
    ),
    (f"{_OFFLOAD}.base", "TransferResult"): ("__init__", "job_id", "success"),
    (f"{_OFFLOAD}.base", "LoadStoreSpec"): (),
    (f"{_OFFLOAD}.base", "BlockIDsLoadStoreSpec"): ("block_ids",),
    (f"{_OFFLOAD}.base", "GPULoadStoreSpec"): ("group_sizes", "block_indices"),
    (f"{_OFFLOAD}.base", "CanonicalKVCaches"): ("tensors", "group_data_refs"),
    (f"{_OFFLOAD}.base", "CanonicalKVCacheRef"): ("tensor_idx", "page_size_bytes"),
    (f"{_OFFLOAD}.base", "CanonicalKVCacheTensor"): ("tensor", "page_size_bytes"),
    (f"{_OFFLOAD}.base", "LookupResult"): ("HIT", "MISS", "RETRY"),
    (f"{_OFFLOAD}.base", "Medium"): ("STORAGE",),
    (f"{_OFFLOAD}.base", "Locality"): ("LOCAL",),
    (f"{_OFFLOAD}.base", "RequestOffloadingContext"): (),
    (f"{_OFFLOAD}.config", "OffloadingConfig"): (
        "groups",
        "extra_config",
        "model",
        "cache",
        "parallel",
        "canonical_layout",
        "kv_cache_layout",
        "engine_id",
    ),
    (f"{_OFFLOAD}.config", "OffloadingParallelConfig"): (
        "rank",
        "world_size",
        "tp_size",
        "pp_size",
        "pcp_size",
        "dcp_size",
    ),
    (f"{_OFFLOAD}.config", "OffloadingModelConfig"): ("dtype",),
    (f"{_OFFLOAD}.config", "OffloadingCacheConfig"): ("blocks_per_chunk",),
    (f"{_OFFLOAD}.config", "OffloadingGroupConfig"): ("layer_names", "tokens_per_block"),
    (f"{_OFFLOAD}.factory", "OffloadingSpecFactory"): ("register_spec",),
    (f"{_OFFLOAD}.cpu.policies.base", "CachePolicy"): (
        "__init__",
        "get",
        "insert",
        "remove",
        "touch",
        "on_store_miss",
        "on_request_finished",
        "evict",
        "clear",
        "mark_evictable",
        "mark_non_evictable",
    ),
    (f"{_OFFLOAD}.cpu.policies.base", "ChunkStatus"): ("ref_cnt", "is_ready"),
    (f"{_OFFLOAD}.cpu.policies.factory", "CachePolicyFactory"): ("register_cache_policy",),
    (f"{_OFFLOAD}.cpu.shared_offload_region", "SharedOffloadRegion"): (
        "__init__",
        "create_next_worker_view",
        "cleanup",
        "mmap_path",
        "_creator",
    ),
    (f"{_OFFLOAD}.tiering.base", "SecondaryTierManager"): (
        "__init__",
        "lookup",
        "submit_store",
        "submit_load",
        "get_finished_jobs",
        "has_pending_work",
        "touch",
        "on_new_request",
        "drain_jobs",
        "take_events",
        "shutdown",
        "block_size_bytes",
        "locality",
    ),
    (f"{_OFFLOAD}.tiering.base", "TransferJob"): ("job_id", "keys", "chunk_ids", "req_context"),
    (f"{_OFFLOAD}.tiering.base", "JobResult"): (
        "__init__",
        "job_id",
        "success",
        "successful_keys",
        "transfer_time",
        "transfer_bytes",
    ),
    (f"{_OFFLOAD}.tiering.factory", "SecondaryTierFactory"): ("register_tier",),
    (f"{_OFFLOAD}.base", "OffloadingManager"): ("get_stats",),
    (f"{_OFFLOAD}.base", "OffloadingCounterMetadata"): ("__init__",),
    (f"{_OFFLOAD}.cpu.manager", "CPUOffloadingManager"): ("_policy",),
    (f"{_OFFLOAD}.tiering.manager", "TieringOffloadingManager"): (
        "primary_tier",
        "secondary_tiers",
        "get_stats",
    ),
    (
        "vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics",
        "OffloadingConnectorStats",
    ): ("__init__", "data", "increase_counter"),
    (f"{_OFFLOAD}.tiering.spec", "TieringOffloadingSpec"): (
        "__init__",
        "get_manager",
        "get_worker",
        "build_metric_definitions",
        "_engine_id",
        "_scheduler_mmap",
        "num_chunks",
        "replicated_layout",
        "kv_bytes_per_chunk",
        "cpu_page_size_per_worker",
        "blocks_per_chunk",
        "config",
    ),
    ("vllm.v1.outputs", "KVConnectorOutput"): ("kv_connector_worker_meta",),
    ("vllm.v1.request", "Request"): (
        "request_id",
        "num_tokens",
        "num_prompt_tokens",
        "num_computed_tokens",
        "all_token_ids",
        "block_hashes",
        "status",
        "prompt_embeds",
        "skip_reading_prefix_cache",
        "lora_request",
        "mm_features",
        "cache_salt",
        "kv_transfer_params",
        "kv_hints",
        "session_id",
        "priority",
        "from_engine_core_request",
    ),
    ("vllm.v1.kv_hints", "KvHintsEnvelope"): ("actions",),
    ("vllm.v1.kv_hints", "KvHintAction"): ("action_type", "action_version", "payload"),
    ("vllm.v1.request", "RequestStatus"): ("PREEMPTED",),
    ("vllm.lora.request", "LoRARequest"): (
        "lora_name",
        "lora_int_id",
        "load_inplace",
    ),
    ("vllm.v1.engine.core", "EngineCore"): (
        "collective_rpc",
        "wake_up",
        "add_lora",
        "remove_lora",
    ),
    ("vllm.multimodal.inputs", "MultiModalFeatureSpec"): (
        "data",
        "modality",
        "identifier",
        "mm_position",
        "mm_hash",
    ),
    ("vllm.multimodal.inputs", "MultiModalKwargsItem"): ("get_data",),
    ("vllm.multimodal.inputs", "PlaceholderRange"): ("offset", "length", "is_embed"),
    ("vllm.config", "MultiModalConfig"): ("mm_processor_cache_type",),
    ("vllm.lora.worker_manager", "WorkerLoRAManager"): ("add_adapter", "_adapter_manager"),
    ("vllm.lora.model_manager", "LoRAModelManager"): ("list_adapters",),
    ("vllm.platforms.interface", "Platform"): ("is_cpu",),
    ("vllm.config", "VllmConfig"): (
        "parallel_config",
        "model_config",
        "cache_config",
        "load_config",
        "lora_config",
        "compilation_config",
        "device_config",
        "ec_transfer_config",
    ),
    ("vllm.config", "DeviceConfig"): ("device_type",),
    ("vllm.model_executor.layers.quantization.base_config", "QuantizationConfig"): (),
    ("vllm.v1.core.block_pool", "BlockPool"): ("cached_block_hash_to_block",),
    ("vllm.v1.core.kv_cache_manager", "KVCacheBlocks"): ("get_block_ids",),
    (_OUTPUT, "SchedulerOutput"): (
        "scheduled_new_reqs",
        "scheduled_cached_reqs",
        "scheduled_spec_decode_tokens",
        "num_scheduled_tokens",
        "total_num_scheduled_tokens",
        "kv_connector_block_state",
    ),
    (_OUTPUT, "KVConnectorBlockState"): ("boundary_state_offloads",),
    (_OUTPUT, "NewRequestData"): ("req_id", "num_computed_tokens"),
    (_OUTPUT, "CachedRequestData"): ("req_ids", "new_block_ids", "num_computed_tokens"),
    ("vllm.v1.kv_cache_interface", "KVCacheConfig"): ("num_blocks", "kv_cache_groups"),
    ("vllm.v1.kv_cache_interface", "KVCacheGroupSpec"): (
        "kv_cache_spec",
        "layer_names",
        "is_eagle_group",
    ),
    ("vllm.v1.kv_cache_interface", "FullAttentionSpec"): (
        "block_size",
        "num_kv_heads",
        "head_size",
        "dtype",
        "page_size_bytes",
        "page_size_padded",
        "real_page_size_bytes",
    ),
    ("vllm.v1.kv_cache_interface", "MLAAttentionSpec"): (),
    ("vllm.v1.kv_cache_interface", "SlidingWindowSpec"): ("sliding_window",),
    ("vllm.v1.kv_cache_interface", "SlidingWindowMLASpec"): ("sliding_window",),
    ("vllm.v1.kv_cache_interface", "ChunkedLocalAttentionSpec"): ("attention_chunk_size",),
    ("vllm.v1.kv_cache_interface", "MambaSpec"): ("shapes", "dtypes", "mamba_cache_mode"),
    ("vllm.config", "ParallelConfig"): (
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "data_parallel_size",
        "data_parallel_index",
        "use_ubatching",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ),
    ("vllm.config", "KVTransferConfig"): ("kv_connector_extra_config", "engine_id"),
    ("vllm.config", "ModelConfig"): (
        "hf_text_config",
        "max_model_len",
        "model",
        "revision",
        "dtype",
        "multimodal_config",
        "seed",
    ),
    ("vllm.config", "CacheConfig"): (
        "block_size",
        "enable_prefix_caching",
        "prefix_caching_hash_algo",
    ),
    ("vllm.config", "LoadConfig"): ("load_format", "download_dir"),
    ("vllm.config", "CompilationConfig"): ("static_forward_context",),
    ("vllm.model_executor.layers.attention", "Attention"): ("attn_backend", "impl"),
    ("vllm.v1.attention.backend", "AttentionBackend"): ("get_name",),
    ("vllm.v1.attention.backends.cpu_attn", "CPUAttentionBackendImpl"): ("do_kv_cache_update",),
}

NAMES = (
    ("vllm", "__version__"),
    ("vllm.distributed.kv_events", "MEDIUM_CPU"),
    ("vllm.distributed.kv_events", "MEDIUM_STORAGE"),
    ("vllm.utils.hashing", "get_hash_fn_by_name"),
    ("vllm.v1.core.kv_cache_utils", "generate_block_hash_extra_keys"),
    ("vllm.v1.core.kv_cache_utils", "hash_block_tokens"),
    ("vllm.v1.core.kv_cache_utils", "maybe_convert_block_hash"),
    ("vllm.v1.core.kv_cache_utils", "to_event_extra_keys"),
    ("vllm.v1.kv_cache_interface", "get_kv_cache_spec_kind"),
    ("vllm.v1.kv_cache_interface", "get_kv_cache_spec_sliding_window"),
    ("vllm.distributed.parallel_state", "get_pp_group"),
    ("vllm.distributed.parallel_state", "get_tp_group"),
    ("vllm.config", "get_current_vllm_config"),
    ("vllm.platforms", "current_platform"),
)
"""Functions and constants, by module."""

_HINTS = "vllm.v1.kv_hints"
SINCE = {
    "0.31": frozenset(
        {
            f"{_HINTS}.KvHintAction",
            f"{_HINTS}.KvHintsEnvelope",
            "vllm.v1.request.Request.kv_hints",
            f"{_OFFLOAD}.base.ReqContext.kv_hints",
            f"{_OFFLOAD}.base.ReqContext.get_offload_key_position",
            f"{_OFFLOAD}.cpu.policies.base.CachePolicy.on_request_finished",
            f"{_OFFLOAD}.cpu.policies.base.CachePolicy.on_store_miss",
            f"{_OFFLOAD}.tiering.base.SecondaryTierManager.block_size_bytes",
            f"{_OFFLOAD}.tiering.base.SecondaryTierManager.__init__",
            f"{_OFFLOAD}.tiering.base.JobResult.__init__",
            f"{_OFFLOAD}.tiering.base.JobResult.transfer_bytes",
            "vllm.v1.core.kv_cache_utils.to_event_extra_keys",
        }
    ),
    "0.32": frozenset(
        {
            f"{_V1}.KVConnectorBase_V1.get_external_cache_hit_sources",
            f"{_V1}.KVConnectorBase_V1.get_loaded_kv_cache_group_ids",
            "vllm.v1.metrics.cache_hit_source.CacheHitSource",
        }
    ),
    "0.33": frozenset({f"{_V1}.KVConnectorBase_V1.unregister_kv_caches"}),
}
"""Names by the version that brought them."""


def members(kind: type) -> set[str]:
    """Names of a class: attributes, annotated fields, and what its methods set on `self`."""
    names = set(dir(kind))
    for base in kind.__mro__[:-1]:
        names |= set(inspect.get_annotations(base))
        try:
            source = inspect.getsource(base)
        except (OSError, TypeError):
            continue
        names |= {part.split(":")[0].split(" ")[0] for part in source.split("self.")[1:]}
    return names


def missing_names() -> frozenset[str]:
    """Return the listed names that the installed vLLM lacks, with their modules."""
    missing: set[str] = set()
    for (module, name), used in USED.items():
        kind = _find(module, name)
        if kind is None:
            missing.add(f"{module}.{name}")
        else:
            missing |= {f"{module}.{name}.{each}" for each in set(used) - members(kind)}
    missing |= {f"{module}.{name}" for module, name in NAMES if _find(module, name) is None}
    return frozenset(missing)


def refused_signatures() -> dict[str, str]:
    """Return the listed calls that the installed vLLM or kvtrie refuses, with both signatures."""
    refused: dict[str, dict[str, str]] = {}
    for (module, name), calls in CALLS.items():
        owner = _find(module, name) if name else _module(module)
        where = f"{module}.{name}" if name else module
        refused[where] = {} if owner is None else refused_calls(owner, calls)
    for (module, name), (ours, kind) in OURS.items():
        base, mine = _find(module, name), _find(f"{__package__}.{ours}", kind)
        if base is not None and mine is not None:
            refused.setdefault(f"{module}.{name}", {}).update(
                refused_overrides(mine, base, USED[module, name])
            )
    return {f"{where}.{name}": why for where, whys in refused.items() for name, why in whys.items()}


def _module(module: str) -> Any:  # noqa: ANN401 - a module or None
    try:
        return import_module(module)
    except Exception:  # noqa: BLE001 - a module that cannot be imported has no name
        return None


def _find(module: str, name: str) -> Any:  # noqa: ANN401 - a class, function or constant
    return getattr(_module(module), name, None)
