"""SGLang options excluded from the name of stored pages, with reasons.

All remaining fields of `ServerArgs` and environment variables of SGLang are part of the name. A
field added by a new SGLang version is included until it is listed here.
Invariant: an option in the list cannot change the K and V of tokens. Cost: none.
"""

from __future__ import annotations

from typing import Final

__all__ = ["FIELDS", "VARIABLES"]

FIELDS: Final[dict[str, tuple[str, ...]]] = {
    "where files are: their content is digested, or the tensors that were loaded from them": (
        "download_dir", "load_format", "lora_paths", "model_loader_extra_config", "model_path",
        "revision", "served_model_name", "speculative_draft_model_path",
        "speculative_draft_model_revision", "tokenizer_path", "weight_loader_disable_mmap",
        "weight_loader_drop_cache_after_load", "weight_loader_prefetch_checkpoints",
        "weight_loader_prefetch_num_threads", "weight_version", "startup_weight_load_mode",
    ),
    "addresses, ports and the places of processes": (
        "base_gpu_id", "disaggregation_bootstrap_port", "disaggregation_ib_device",
        "dist_init_addr",
        "encoder_bootstrap_port", "encoder_register_urls", "encoder_urls",
        "engine_info_bootstrap_port",
        "forward_pass_metrics_ipc_name", "forward_pass_metrics_worker_id", "gated_launch_port",
        "gpu_id_step", "grpc_port", "host", "mooncake_ib_device", "nccl_port", "node_rank",
        "numa_node", "port", "smg_http_sidecar_port", "weight_cache_socket",
    ),
    "logging, metrics and tracing": (
        "bucket_e2e_request_latency", "bucket_inter_token_latency", "bucket_time_to_first_token",
        "crash_dump_folder", "decode_log_interval", "enable_forward_pass_metrics", "enable_metrics",
        "enable_metrics_for_all_schedulers", "enable_mfu_metrics",
        "enable_request_time_stats_logging",
        "enable_trace", "export_metrics_to_file", "export_metrics_to_file_dir",
        "extra_metric_labels",
        "gc_warning_threshold_secs", "generation_tokens_buckets", "kv_events_config",
        "load_publish_endpoint", "load_snapshot_publish_interval", "log_level", "log_level_http",
        "log_requests", "log_requests_format", "log_requests_level", "log_requests_target",
        "otlp_service_name", "otlp_traces_endpoint", "prompt_tokens_buckets", "show_time_cost",
        "spec_trace_dir", "stat_loggers", "tokenizer_metrics_allowed_custom_labels",
        "tokenizer_metrics_custom_labels_header", "trace_modules",
        "uvicorn_access_log_exclude_prefixes",
    ),
    "the HTTP and gRPC servers, and texts before they are tokens": (
        "admin_api_key", "allow_auto_truncate", "api_key", "batch_notify_size", "chat_template",
        "completion_template", "default_chat_template_kwargs", "detokenizer_worker_num",
        "disable_tokenizer_batch_decode", "dynamic_batch_tokenizer_batch_size",
        "dynamic_batch_tokenizer_batch_timeout", "enable_cache_report",
        "enable_dynamic_batch_tokenizer", "enable_http2", "enable_http_worker_reuseport",
        "enable_ssl_refresh", "enable_tokenizer_batch_encode", "fastapi_root_path",
        "file_storage_path", "grpc_mode", "grpc_response_timeout_secs", "grpc_worker_threads",
        "hf_chat_template_name", "http2_initial_connection_window_size",
        "http2_max_concurrent_streams", "incremental_streaming_output", "reasoning_parser",
        "return_input_ids", "return_output_ids", "sidecar", "sidecar_args", "skip_server_warmup",
        "skip_tokenizer_init", "smg_grpc_mode", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile",
        "ssl_keyfile_password", "stream_interval", "stream_response_default_include_usage",
        "tokenizer_backend", "tokenizer_mode", "tokenizer_worker_num", "tool_call_parser",
        "tool_server", "trust_request_chat_template", "warmups",
    ),
    "how tokens are chosen from logits": (
        "constrained_json_disable_any_whitespace", "constrained_json_max_whitespace_cnt",
        "constrained_json_whitespace_pattern", "disable_outlines_disk_cache",
        "enable_custom_logit_processor", "enable_strict_thinking", "grammar_backend",
        "preferred_sampling_params", "random_seed", "sampling_backend", "sampling_defaults",
        "sampling_mask_max_tokens",
    ),
    "sizes that are measured at start, and how many requests run at once": (
        "abort_on_priority_when_disabled", "cuda_graph_bs_decode", "cuda_graph_bs_prefill",
        "cuda_graph_config", "cuda_graph_max_bs_decode", "cuda_graph_max_bs_prefill",
        "cuda_graph_max_seq_len_prefill", "default_priority_value", "disable_overlap_schedule",
        "disable_priority_preemption", "enable_priority_scheduling", "max_loaded_loras",
        "max_loras_per_batch", "max_prefill_tokens", "max_queued_requests", "max_running_requests",
        "max_total_tokens", "mem_fraction_static", "num_reserved_decode_tokens",
        "prefill_max_requests", "priority_scheduling_preemption_threshold", "retraction_policy",
        "schedule_conservativeness", "schedule_low_priority_values_first", "schedule_policy",
        "scheduler_recv_interval", "torch_compile_max_bs",
    ),
    "which KV is kept, and where: the form of stored pages is in their name": (
        "_radix_eviction_policy_explicitly_set", "disable_radix_cache", "enable_hierarchical_cache",
        "hicache_host_memory_fraction", "hicache_host_memory_mode", "hicache_io_backend",
        "hicache_ratio", "hicache_size", "hicache_storage_backend",
        "hicache_storage_backend_extra_config", "hicache_storage_prefetch_policy",
        "hicache_storage_prefetch_retry_max_attempts",
        "hicache_storage_prefetch_retry_poll_interval",
        "hicache_write_policy", "lora_eviction_policy", "radix_cache_backend",
        "radix_eviction_policy", "radix_eviction_policy_config",
    ),
    "how arguments were resolved: the results are encoded": (
        "_input_frozen", "_raw_input", "_resolution_failed", "_resolution_finished",
        "_resolved_overrides",
    ),
    "watching processes": (
        "custom_sigquit_handler", "dist_timeout", "gc_threshold", "sleep_on_idle",
        "soft_watchdog_timeout", "watchdog_timeout",
    ),
}  # fmt: skip
"""Fields of `ServerArgs`, by the reason."""

VARIABLES: Final[dict[str, tuple[str, ...]]] = {
    "places of files, logging and addresses": (
        "SGLANG_CACHE_DIR", "SGLANG_HOST_IP", "SGLANG_LOGGING_CONFIG_PATH", "SGLANG_LOG_GC",
        "SGLANG_PORT", "SGLANG_PROMETHEUS_MULTIPROC_DIR",
    ),
}  # fmt: skip
"""Environment variables of SGLang, by the reason."""
