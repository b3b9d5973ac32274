# Written by tests/served/stubs.py out of the installed package: do not edit.

from vllm.v1.kv_offload.base import OffloadingManager
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy

class CPUOffloadingManager(OffloadingManager):
    _policy: CachePolicy
