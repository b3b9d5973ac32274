# Written by tests/served/stubs.py out of the installed package: do not edit.

from typing import Any
import torch

class BaseTokenToKVPoolAllocator:
    size: int
    def available_size(self) -> Any: ...
    def free_segment(self, free_index: torch.Tensor, *, start_pos: int) -> Any: ...
