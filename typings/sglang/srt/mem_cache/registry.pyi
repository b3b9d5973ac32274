# Written by tests/served/stubs.py out of the installed package: do not edit.

from dataclasses import dataclass
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from typing import Any

def get_radix_cache_factory(name: str) -> Any | None: ...

def register_radix_cache_backend(name: str, factory: Any) -> None: ...

@dataclass(init=False)
class TreeCacheBuildContext:
    params: CacheInitParams
    is_hybrid_swa: bool
    is_hybrid_ssm: bool
    full_tokens_per_layer: int | None
    enable_hierarchical_cache: bool
    tp_size: int
    tp_rank: int
