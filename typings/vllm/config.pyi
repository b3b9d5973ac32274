# Written by tests/served/stubs.py out of the installed package: do not edit.

from dataclasses import dataclass
from typing import Any

def get_current_vllm_config() -> VllmConfig: ...

@dataclass(init=False)
class MultiModalConfig:
    mm_processor_cache_type: Any

@dataclass(init=False)
class VllmConfig:
    parallel_config: ParallelConfig
    model_config: ModelConfig
    cache_config: CacheConfig
    load_config: LoadConfig
    lora_config: Any | None
    compilation_config: CompilationConfig
    device_config: DeviceConfig
    ec_transfer_config: Any | None

@dataclass(init=False)
class DeviceConfig:
    device_type: str

@dataclass(init=False)
class ParallelConfig:
    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    data_parallel_index: int
    @property
    def use_ubatching(self) -> bool: ...
    decode_context_parallel_size: int
    prefill_context_parallel_size: int

@dataclass(init=False)
class KVTransferConfig:
    kv_connector_extra_config: dict[str, Any]
    engine_id: str | None

@dataclass(init=False)
class ModelConfig:
    hf_text_config: Any
    max_model_len: int
    model: str
    revision: str | None
    dtype: Any | Any
    multimodal_config: MultiModalConfig | None
    seed: int

@dataclass(init=False)
class CacheConfig:
    block_size: int
    enable_prefix_caching: bool
    prefix_caching_hash_algo: Any

@dataclass(init=False)
class LoadConfig:
    load_format: str
    download_dir: str | None

@dataclass(init=False)
class CompilationConfig:
    static_forward_context: dict[str, Any]
