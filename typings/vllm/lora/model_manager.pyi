# Written by tests/served/stubs.py out of the installed package: do not edit.

from typing import Any

class LoRAModelManager:
    def list_adapters(self) -> dict[int, Any]: ...
