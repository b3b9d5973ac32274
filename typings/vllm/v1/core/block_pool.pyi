# Written by tests/served/stubs.py out of the installed package: do not edit.

from typing import Any

class BlockPool:
    cached_block_hash_to_block: Any
