# Written by tests/served/stubs.py out of the installed package: do not edit.

from typing import Any
import torch

class MambaSlotAllocator:
    size: int
    def available_size(self) -> int: ...
    def free(self, free_index: torch.Tensor) -> Any: ...
