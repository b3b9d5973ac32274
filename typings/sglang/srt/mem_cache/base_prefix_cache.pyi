# Written by tests/served/stubs.py out of the installed package: do not edit.

from dataclasses import dataclass
from sglang.srt.mem_cache.radix_cache import RadixKey
from typing import Any
import torch

@dataclass(init=False)
class MatchPrefixParams:
    key: RadixKey
    req: Any | None

@dataclass(init=False)
class InsertParams:
    key: RadixKey | None
    value: torch.Tensor | None

@dataclass(init=False)
class EvictParams:
    num_tokens: int

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
        adopted_ranges: dict[Any, list[tuple[int, int]]] | None = ...,
        cache_actions: list[Any | Any] = ...,
    ) -> None: ...
    prefix_len: int
    last_device_node: Any

@dataclass(init=False)
class EvictResult:
    def __init__(
        self,
        num_tokens_evicted: int = ...,
        swa_num_tokens_evicted: int = ...,
        mamba_num_evicted: int = ...,
    ) -> None: ...
    num_tokens_evicted: int

@dataclass(init=False)
class IncLockRefResult:
    def __init__(
        self,
        delta: int | None = ...,
        node_id: int | None = ...,
        skipped_lock_components: tuple[Any, ...] = ...,
        component_lock_uuids: dict[Any, int | None] = ...,
        component_host_lock_uuids: dict[Any, int | None] = ...,
    ) -> None: ...
    delta: int | None

@dataclass(init=False)
class DecLockRefResult:
    def __init__(self, delta: int | None = ...) -> None: ...
    delta: int | None
