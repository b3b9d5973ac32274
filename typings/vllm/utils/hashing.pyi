# Written by tests/served/stubs.py out of the installed package: do not edit.

from typing import Any

def get_hash_fn_by_name(hash_fn_name: str) -> Any: ...
