# Written by tests/served/stubs.py out of the installed package: do not edit.

from typing import Any

class ReqToTokenPool:
    req_to_token: Any
    def write(self, indices: Any, values: Any) -> Any: ...

class HybridReqToTokenPool(ReqToTokenPool):
    mamba_allocator: Any
    mamba_pool: Any
