"""All that kvtrie uses of vLLM: module, class, and its methods, properties and fields."""

from __future__ import annotations

_V1 = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_OUTPUT = "vllm.v1.core.sched.output"

OVERRIDDEN = (
    "requires_kv_delivery",
    "requires_piecewise_for_cudagraph",
    "set_xfer_handshake_metadata",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "get_external_cache_hit_sources",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "has_pending_push_work",
    "reset_cache",
    "take_events",
    "register_kv_caches",
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
    (_V1, "KVConnectorBase_V1"): (*OVERRIDDEN, "_get_connector_metadata", "_kv_transfer_config"),
    (_V1, "KVConnectorMetadata"): (),
    (_V1, "KVConnectorHandshakeMetadata"): (),
    (_V1, "KVConnectorWorkerMetadata"): ("aggregate",),
    ("vllm.distributed.kv_transfer.kv_connector.factory", "KVConnectorFactory"): (
        "register_connector",
    ),
    ("vllm.v1.metrics.cache_hit_source", "CacheHitSource"): ("HOST", "DISK"),
    ("vllm.v1.outputs", "KVConnectorOutput"): ("kv_connector_worker_meta",),
    ("vllm.v1.request", "Request"): (
        "request_id",
        "num_tokens",
        "num_prompt_tokens",
        "all_token_ids",
        "status",
        "prompt_embeds",
        "lora_request",
        "mm_features",
        "cache_salt",
        "kv_transfer_params",
    ),
    ("vllm.v1.request", "RequestStatus"): ("PREEMPTED",),
    ("vllm.v1.core.kv_cache_manager", "KVCacheBlocks"): ("get_block_ids",),
    (_OUTPUT, "SchedulerOutput"): (
        "scheduled_new_reqs",
        "scheduled_cached_reqs",
        "scheduled_spec_decode_tokens",
        "num_scheduled_tokens",
        "total_num_scheduled_tokens",
    ),
    (_OUTPUT, "NewRequestData"): ("req_id", "num_computed_tokens"),
    (_OUTPUT, "CachedRequestData"): ("req_ids", "new_block_ids", "num_computed_tokens"),
    ("vllm.v1.kv_cache_interface", "KVCacheConfig"): ("num_blocks", "kv_cache_groups"),
    ("vllm.v1.kv_cache_interface", "KVCacheGroupSpec"): ("kv_cache_spec", "layer_names"),
    ("vllm.v1.kv_cache_interface", "FullAttentionSpec"): (
        "block_size",
        "num_kv_heads",
        "head_size",
        "dtype",
        "page_size_bytes",
    ),
    ("vllm.v1.kv_cache_interface", "MLAAttentionSpec"): (),
    ("vllm.config", "ParallelConfig"): (
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ),
    ("vllm.config", "KVTransferConfig"): ("kv_connector_extra_config",),
    ("vllm.config", "ModelConfig"): (
        "hf_config",
        "hf_text_config",
        "model",
        "revision",
        "dtype",
        "quantization",
        "seed",
    ),
    ("vllm.config", "CacheConfig"): ("cache_dtype",),
    ("vllm.config", "LoadConfig"): ("load_format",),
}
