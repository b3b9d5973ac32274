# Written by tests/served/stubs.py out of the installed package: do not edit.

from dataclasses import dataclass
from typing import Any

@dataclass(init=False)
class KVCacheConfig:
    num_blocks: int
    kv_cache_groups: list[KVCacheGroupSpec]

@dataclass(init=False)
class KVCacheGroupSpec:
    kv_cache_spec: Any
    layer_names: list[str]

@dataclass(init=False)
class FullAttentionSpec:
    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: Any
    @property
    def page_size_bytes(self) -> int: ...

@dataclass(init=False)
class MLAAttentionSpec(FullAttentionSpec): ...
