# Written by tests/served/stubs.py out of the installed package: do not edit.

from typing import Any
import torch

class CPUAttentionBackendImpl:
    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None: ...
