# Written by tests/served/stubs.py out of the installed package: do not edit.

from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any
from vllm.v1.request import Request

def generate_block_hash_extra_keys(
    request: Request,
    start_token_idx: int,
    end_token_idx: int,
    start_mm_idx: int,
) -> tuple[tuple[Any, ...] | None, int]: ...

def hash_block_tokens(
    hash_function: Any,
    parent_block_hash: Any | None,
    curr_block_token_ids: Sequence[int],
    extra_keys: tuple[Any, ...] | None = ...,
) -> Any: ...

def maybe_convert_block_hash(hash_bytes: Any) -> bytes | int: ...

def to_event_extra_keys(
    extra_keys: Iterable[tuple[Any, ...] | None] | None,
) -> list[tuple[Any, ...] | None] | None: ...
