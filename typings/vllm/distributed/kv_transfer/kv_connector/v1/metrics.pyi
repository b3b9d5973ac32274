# Written by tests/served/stubs.py out of the installed package: do not edit.

from dataclasses import dataclass
from typing import Any
from vllm.config import VllmConfig

@dataclass(init=False)
class KVConnectorStats:
    def __init__(self, data: dict[str, Any] = ...) -> None: ...
    data: dict[str, Any]
    def reset(self) -> Any: ...
    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats: ...
    def reduce(self) -> dict[str, int | float]: ...
    def is_empty(self) -> bool: ...

class KVConnectorPromMetrics:
    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any | Any | Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None: ...
    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = ...) -> Any: ...
    per_engine_labelvalues: dict[int, list[object]]
