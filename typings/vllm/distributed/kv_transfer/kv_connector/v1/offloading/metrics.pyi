# Written by tests/served/stubs.py out of the installed package: do not edit.

from dataclasses import dataclass
from typing import Any
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

@dataclass(init=False)
class OffloadingConnectorStats(KVConnectorStats):
    def __init__(self, data: dict[str, Any] = ...) -> None: ...
    data: dict[str, Any]
    def increase_counter(
        self,
        counter_name: str,
        counter_increase_value: int | float = ...,
        labelvalues: tuple[str, ...] = ...,
    ) -> None: ...
