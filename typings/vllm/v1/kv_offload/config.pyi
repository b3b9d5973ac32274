# Written by tests/served/stubs.py out of the installed package: do not edit.

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

@dataclass(init=False)
class OffloadingConfig:
    groups: tuple[OffloadingGroupConfig, ...]
    extra_config: Mapping[str, Any]
    model: OffloadingModelConfig
    cache: OffloadingCacheConfig
    parallel: OffloadingParallelConfig
    canonical_layout: bool
    kv_cache_layout: str | None
    engine_id: str

@dataclass(init=False)
class OffloadingParallelConfig:
    rank: int
    world_size: int
    tp_size: int
    pp_size: int
    pcp_size: int
    dcp_size: int

@dataclass(init=False)
class OffloadingModelConfig:
    dtype: str

@dataclass(init=False)
class OffloadingCacheConfig:
    blocks_per_chunk: int

@dataclass(init=False)
class OffloadingGroupConfig:
    layer_names: tuple[str, ...]
    tokens_per_block: int
