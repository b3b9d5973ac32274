# Written by tests/served/stubs.py out of the installed package: do not edit.

from typing import Any

def get_lora() -> Any: ...

def get_server_args() -> Any: ...
