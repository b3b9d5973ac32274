# Written by tests/served/stubs.py out of the installed package: do not edit.

from typing import Any
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import OffloadingManager

class TieringOffloadingManager(OffloadingManager):
    primary_tier: Any
    secondary_tiers: Any
    def get_stats(self) -> OffloadingConnectorStats | None: ...
