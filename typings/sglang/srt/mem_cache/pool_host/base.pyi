# Written by tests/served/stubs.py out of the installed package: do not edit.

from typing import Any
import torch

class HostKVCache:
    layout: str
    page_size: Any
    page_num: Any
    def get_data_page(self, index: Any, flat: bool = ...) -> torch.Tensor: ...
    def get_dummy_flat_data_page(self) -> torch.Tensor: ...
    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None: ...
