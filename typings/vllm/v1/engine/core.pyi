# Written by tests/served/stubs.py out of the installed package: do not edit.

from typing import Any
from vllm.lora.request import LoRARequest

class EngineCore:
    def collective_rpc(
        self,
        method: str | Any,
        timeout: float | None = ...,
        args: tuple[Any, ...] = ...,
        kwargs: dict[str, Any] | None = ...,
    ) -> list[Any]: ...
    def wake_up(self, tags: list[str] | None = ...) -> bool: ...
    def add_lora(self, lora_request: LoRARequest) -> bool: ...
    def remove_lora(self, lora_id: int) -> bool: ...
    def _reset_caches(
        self,
        reset_running_requests: bool = ...,
        reset_connector: bool = ...,
    ) -> None: ...
