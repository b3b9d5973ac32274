# Written by tests/served/stubs.py out of the installed package: do not edit.

from dataclasses import dataclass
from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from typing import Any

@dataclass(init=False)
class CacheInitParams:
    is_eagle: bool
    page_size: int
    eviction_policy_config: dict[str, Any] | None
    enable_metrics: bool
    token_to_kv_pool_allocator: BaseTokenToKVPoolAllocator
    pp_rank: int
    sliding_window_size: int | None
    @property
    def swa_retain_window(self) -> int | None: ...
    draft_swa_window: int
    swa_gates_prefix_match: bool
    decoder_swa_bounded_replay: bool
    req_to_token_pool: ReqToTokenPool
    enable_mamba_extra_buffer: bool
    enable_mamba_extra_buffer_lazy: bool
