# Written by tests/served/stubs.py out of the installed package: do not edit.

from collections.abc import Collection
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from vllm.v1.kv_offload.base import Locality
from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.kv_offload.base import OffloadingEvent
from vllm.v1.kv_offload.base import ReqContext
from vllm.v1.kv_offload.base import RequestOffloadingContext

class SecondaryTierManager:
    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any | None = ...,
    ) -> None: ...
    def lookup(self, key: Any, req_context: ReqContext) -> LookupResult: ...
    def submit_store(self, job_metadata: TransferJob) -> None: ...
    def submit_load(self, job_metadata: TransferJob) -> None: ...
    def get_finished_jobs(self) -> Iterable[JobResult]: ...
    def has_pending_work(self) -> bool: ...
    def touch(self, keys: Collection[Any], req_context: ReqContext) -> Any: ...
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext: ...
    def drain_jobs(self) -> None: ...
    def take_events(self) -> Iterable[OffloadingEvent]: ...
    def shutdown(self) -> None: ...
    @property
    def block_size_bytes(self) -> int: ...
    locality: Locality | None

@dataclass(init=False)
class TransferJob:
    job_id: int
    keys: Collection[Any]
    chunk_ids: Any
    req_context: ReqContext

@dataclass(init=False)
class JobResult:
    def __init__(
        self,
        job_id: int,
        success: bool,
        successful_keys: Collection[Any] | None = ...,
        transfer_time: float | None = ...,
        transfer_bytes: int | None = ...,
    ) -> None: ...
    job_id: int
    success: bool
    successful_keys: Collection[Any] | None
    transfer_time: float | None
    transfer_bytes: int | None
