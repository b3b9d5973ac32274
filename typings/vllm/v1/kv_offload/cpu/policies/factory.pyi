# Written by tests/served/stubs.py out of the installed package: do not edit.

from typing import Any

class CachePolicyFactory:
    @classmethod
    def register_cache_policy(cls, name: str, module_path: str, class_name: str) -> None: ...
