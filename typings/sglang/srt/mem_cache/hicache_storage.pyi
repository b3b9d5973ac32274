# Written by tests/served/stubs.py out of the installed package: do not edit.

from dataclasses import dataclass
from enum import Enum
from sglang.srt.mem_cache.pool_host.base import HostKVCache
from typing import Any
import torch

class HiCacheStorage:
    def __init__(self) -> None: ...
    def register_mem_pool_host(self, mem_pool_host: HostKVCache) -> Any: ...
    def register_mem_host_pool_v2(self, host_pool: HostKVCache, host_pool_name: Any) -> Any: ...
    def exists(self, key: str) -> bool: ...
    def batch_exists(
        self,
        keys: list[str],
        extra_info: HiCacheStorageExtraInfo | None = ...,
    ) -> int: ...
    def get(
        self,
        key: str,
        target_location: Any | None = ...,
        target_sizes: Any | None = ...,
    ) -> torch.Tensor | None: ...
    def batch_get(
        self,
        keys: list[str],
        target_locations: Any | None = ...,
        target_sizes: Any | None = ...,
    ) -> list[torch.Tensor | None] | int: ...
    def set(
        self,
        key: str,
        value: Any | None = ...,
        target_location: Any | None = ...,
        target_sizes: Any | None = ...,
    ) -> bool: ...
    def batch_set(
        self,
        keys: list[str],
        values: Any | None = ...,
        target_locations: Any | None = ...,
        target_sizes: Any | None = ...,
    ) -> bool: ...
    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = ...,
    ) -> list[bool]: ...
    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = ...,
    ) -> list[bool]: ...
    def on_host_pools_registered(self) -> None: ...
    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = ...,
        extra_info: HiCacheStorageExtraInfo | None = ...,
    ) -> PoolTransferResult: ...
    def batch_get_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = ...,
    ) -> dict[str, list[bool]]: ...
    def batch_set_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = ...,
    ) -> dict[str, list[bool]]: ...
    def clear(self) -> None: ...
    mem_pool_host: HostKVCache

@dataclass(init=False)
class HiCacheStorageConfig:
    is_mla_model: bool
    extra_config: dict[Any, Any] | None
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    attn_cp_rank: int
    attn_cp_size: int

@dataclass(init=False)
class HiCacheStorageExtraInfo:
    prefix_keys: list[str] | None

class PoolName(str, Enum):
    KV = ...

class PoolHitPolicy(str, Enum):
    TRAILING_PAGES = ...
    BLOCK_GROUPS = ...

@dataclass(init=False)
class PoolTransfer:
    def __init__(
        self,
        name: PoolName,
        host_indices: torch.Tensor | None = ...,
        device_indices: torch.Tensor | None = ...,
        keys: list[str] | None = ...,
        hit_policy: PoolHitPolicy = ...,
        nodes_to_load: list[Any] | None = ...,
        indices_from_pool: PoolName | None = ...,
        block_pages: int = ...,
        group_pages: int = ...,
    ) -> None: ...
    name: PoolName
    host_indices: torch.Tensor | None
    keys: list[str] | None
    hit_policy = ...

@dataclass(init=False)
class PoolTransferResult:
    def __init__(
        self,
        kv_hit_pages: int,
        extra_pool_hit_pages: dict[str, int],
        restorable_prefix_pages: list[int] | None = ...,
    ) -> None: ...
    @classmethod
    def empty(cls) -> PoolTransferResult: ...
