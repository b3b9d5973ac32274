# Written by tests/served/stubs.py out of the installed package: do not edit.

from typing import Any
from vllm.lora.model_manager import LoRAModelManager

class WorkerLoRAManager:
    def add_adapter(self, adapter_request: Any) -> bool: ...
    _adapter_manager: LoRAModelManager
