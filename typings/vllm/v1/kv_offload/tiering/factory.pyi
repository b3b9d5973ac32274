# Written by tests/served/stubs.py out of the installed package: do not edit.

from typing import Any

class SecondaryTierFactory:
    @classmethod
    def register_tier(cls, tier_type: str, module_path: str, class_name: str) -> None: ...
