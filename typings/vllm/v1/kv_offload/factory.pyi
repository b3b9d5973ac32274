# Written by tests/served/stubs.py out of the installed package: do not edit.

from typing import Any

class OffloadingSpecFactory:
    @classmethod
    def register_spec(cls, name: str, module_path: str, class_name: str) -> None: ...
