# Written by tests/served/stubs.py out of the installed package: do not edit.

from dataclasses import dataclass
from typing import Any

def get_kv_cache_spec_kind(kv_cache_spec: Any) -> Any: ...

def get_kv_cache_spec_sliding_window(kv_cache_spec: Any) -> int | None: ...

@dataclass(init=False)
class KVCacheConfig:
    num_blocks: int
    kv_cache_groups: list[KVCacheGroupSpec]

@dataclass(init=False)
class KVCacheGroupSpec:
    kv_cache_spec: Any
    layer_names: list[str]
    is_eagle_group: bool

@dataclass(init=False)
class FullAttentionSpec:
    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: Any
    @property
    def page_size_bytes(self) -> int: ...
    page_size_padded: int | None
    @property
    def real_page_size_bytes(self) -> int: ...

@dataclass(init=False)
class MLAAttentionSpec(FullAttentionSpec): ...

@dataclass(init=False)
class SlidingWindowSpec:
    sliding_window: int

@dataclass(init=False)
class SlidingWindowMLASpec(SlidingWindowSpec):
    sliding_window: int

@dataclass(init=False)
class ChunkedLocalAttentionSpec:
    attention_chunk_size: int

@dataclass(init=False)
class MambaSpec:
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[Any, ...]
    mamba_cache_mode: str
