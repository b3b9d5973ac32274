# Written by tests/served/stubs.py out of the installed package: do not edit.

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_hints import KvHintsEnvelope
import torch

@dataclass(init=False)
class ReqContext:
    req_id: str
    kv_transfer_params: dict[str, Any] | None
    kv_hints: KvHintsEnvelope | None
    def get_state(self, cls: type[Any]) -> Any | None: ...
    def set_state(self, val: Any) -> None: ...
    def get_offload_key_position(self, key: Any) -> int | None: ...

@dataclass(init=False)
class OffloadingEvent:
    def __init__(
        self,
        keys: list[Any],
        medium: Medium,
        removed: bool,
        locality: Locality | None = ...,
        ownership: str | None = ...,
        removal_expected: bool = ...,
        metadata_only: bool = ...,
    ) -> None: ...
    keys: list[Any]
    medium: Medium
    removed: bool
    locality: Locality | None

class OffloadingWorker:
    def submit_store(
        self,
        job_id: int,
        src_spec: GPULoadStoreSpec,
        dst_spec: LoadStoreSpec,
    ) -> bool: ...
    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = ...,
    ) -> bool: ...
    def get_finished(self) -> list[TransferResult]: ...
    def wait(self, job_ids: set[int]) -> None: ...
    def shutdown(self) -> None: ...

@dataclass(init=False)
class TransferResult:
    def __init__(
        self,
        job_id: int,
        success: bool,
        transfer_size: int | None = ...,
        transfer_time: float | None = ...,
    ) -> None: ...
    job_id: int
    success: bool

class LoadStoreSpec: ...

class BlockIDsLoadStoreSpec(LoadStoreSpec):
    block_ids: Any

class GPULoadStoreSpec(BlockIDsLoadStoreSpec):
    group_sizes: Sequence[int]
    block_indices: Sequence[int]

@dataclass(init=False)
class CanonicalKVCaches:
    tensors: list[CanonicalKVCacheTensor]
    group_data_refs: list[list[CanonicalKVCacheRef]]

@dataclass(init=False)
class CanonicalKVCacheRef:
    tensor_idx: int
    page_size_bytes: int

@dataclass(init=False)
class CanonicalKVCacheTensor:
    tensor: torch.Tensor
    page_size_bytes: int

class LookupResult(Enum):
    HIT = ...
    MISS = ...
    RETRY = ...

class Medium(Enum):
    STORAGE = ...

class Locality(Enum):
    LOCAL = ...

@dataclass(init=False)
class RequestOffloadingContext: ...

class OffloadingManager:
    def get_stats(self) -> OffloadingConnectorStats | None: ...

@dataclass(init=False)
class OffloadingCounterMetadata:
    def __init__(self, documentation: str, labelnames: tuple[str, ...] = ...) -> None: ...
