# Written by tests/served/stubs.py out of the installed package: do not edit.

from typing import Any

class KVConnectorFactory:
    @classmethod
    def register_connector(cls, name: str, module_path: str, class_name: str) -> None: ...
