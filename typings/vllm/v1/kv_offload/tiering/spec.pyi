# Written by tests/served/stubs.py out of the installed package: do not edit.

from typing import Any
from vllm.v1.kv_offload.base import CanonicalKVCaches
from vllm.v1.kv_offload.base import OffloadingManager
from vllm.v1.kv_offload.base import OffloadingWorker
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

class TieringOffloadingSpec:
    def __init__(self, config: OffloadingConfig) -> None: ...
    def get_manager(self) -> OffloadingManager: ...
    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker: ...
    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]: ...
    _engine_id: Any
    _scheduler_mmap: SharedOffloadRegion | None
    num_chunks: Any
    replicated_layout: Any
    kv_bytes_per_chunk: Any
    cpu_page_size_per_worker: Any
    blocks_per_chunk: Any
    config: OffloadingConfig
