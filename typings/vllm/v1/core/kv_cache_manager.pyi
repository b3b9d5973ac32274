# Written by tests/served/stubs.py out of the installed package: do not edit.

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

@dataclass(init=False)
class KVCacheBlocks:
    def get_block_ids(
        self,
        allow_none: bool = ...,
        *,
        group_ids: Sequence[int] | None = ...,
    ) -> tuple[list[int], ...] | None: ...
