# Written by tests/served/stubs.py out of the installed package: do not edit.

from dataclasses import dataclass
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from typing import Any
import torch

@dataclass(init=False)
class MatchPrefixParams:
    key: RadixKey
    req: Any | None

@dataclass(init=False)
class InsertParams:
    def __init__(
        self,
        key: RadixKey | None = ...,
        value: torch.Tensor | None = ...,
        mamba_value: torch.Tensor | None = ...,
        mamba_keep_idx: int | None = ...,
        c128_value: torch.Tensor | None = ...,
        prev_prefix_len: int = ...,
        swa_branching_seqlen: int | None = ...,
        inserted_len: int = ...,
        priority: int = ...,
        session_id: str | None = ...,
        track_adopted_ranges: bool = ...,
        rotation_base: int | None = ...,
        *,
        component_evicted_seqlens: dict[ComponentType, int] = ...,
    ) -> None: ...
    key: RadixKey | None
    value: torch.Tensor | None
    prev_prefix_len: int
    def get_evicted_seqlen(self, component_type: ComponentType) -> int: ...
    def set_evicted_seqlen(self, component_type: ComponentType, length: int) -> None: ...
    mamba_value: torch.Tensor | None

@dataclass(init=False)
class EvictParams:
    num_tokens: int
    swa_num_tokens: int
    mamba_num: int

@dataclass(init=False)
class TreeLock:
    node: Any
    swa_released: bool

@dataclass(init=False)
class DecLockRefParams: ...

class MatchResult:
    def __init__(
        self,
        device_prefix_len: Any,
        last_device_node: Any,
        last_host_node: Any,
        best_match_node: Any,
        host_hit_length: Any = ...,
        swa_host_hit_length: Any = ...,
        swa_branching_seqlen: Any = ...,
        mamba_host_hit_length: Any = ...,
        mamba_branching_seqlen: Any = ...,
        cache_protected_len: Any = ...,
        full_kv_hit_length: Any = ...,
        cache_actions: Any = ...,
        last_visited_node_id: Any = ...,
        full_device_match_len: Any = ...,
    ) -> None: ...
    device_prefix_len: Any
    last_device_node: Any
    last_host_node: Any
    best_match_node: Any
    full_kv_hit_length: Any
    swa_branching_seqlen: Any
    mamba_branching_seqlen: Any
    def _replace(self, **kwds: Any) -> Any: ...

@dataclass(init=False)
class InsertResult:
    def __init__(
        self,
        prefix_len: int,
        total_len: int = ...,
        last_device_node: Any = ...,
        mamba_exist: bool = ...,
        swa_branch_inserted: bool = ...,
        rotation_tail_declined: bool = ...,
        inserted_host_node: Any = ...,
        host_insert_dropped: bool = ...,
        adopted_ranges: dict[ComponentType, list[tuple[int, int]]] | None = ...,
        cache_actions: list[Any | Any] = ...,
    ) -> None: ...
    prefix_len: int
    last_device_node: Any
    mamba_exist: bool

@dataclass(init=False)
class EvictResult:
    def __init__(
        self,
        num_tokens_evicted: int = ...,
        swa_num_tokens_evicted: int = ...,
        mamba_num_evicted: int = ...,
    ) -> None: ...
    num_tokens_evicted: int
    swa_num_tokens_evicted: int
    mamba_num_evicted: int

@dataclass(init=False)
class IncLockRefResult:
    def __init__(
        self,
        delta: int | None = ...,
        node_id: int | None = ...,
        skipped_lock_components: tuple[ComponentType, ...] = ...,
        component_lock_uuids: dict[ComponentType, int | None] = ...,
        component_host_lock_uuids: dict[ComponentType, int | None] = ...,
    ) -> None: ...
    delta: int | None

@dataclass(init=False)
class DecLockRefResult:
    def __init__(self, delta: int | None = ...) -> None: ...
    delta: int | None
