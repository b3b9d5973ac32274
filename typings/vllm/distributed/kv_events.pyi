# Written by tests/served/stubs.py out of the installed package: do not edit.

from typing import Any

MEDIUM_CPU: str

MEDIUM_STORAGE: str

class BlockStored:
    def __init__(
        self,
        block_hashes: list[bytes | int],
        parent_block_hash: bytes | int | None,
        token_ids: list[int],
        block_size: int,
        lora_id: int | None,
        medium: str | None,
        lora_name: str | None,
        extra_keys: list[tuple[Any, ...] | None] | None = ...,
        group_idx: int | None = ...,
        kv_cache_spec_kind: str | None = ...,
        kv_cache_spec_sliding_window: int | None = ...,
        locality: str | None = ...,
        ownership: str | None = ...,
        session_id: str | None = ...,
        lookahead_token_ids: list[list[int]] | None = ...,
    ) -> None: ...
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    lora_name: str | None
    medium: str | None
    extra_keys: list[tuple[Any, ...] | None] | None
    group_idx: int | None
    kv_cache_spec_kind: str | None
    kv_cache_spec_sliding_window: int | None

class BlockRemoved:
    def __init__(
        self,
        block_hashes: list[bytes | int],
        medium: str | None,
        group_idx: int | None = ...,
        locality: str | None = ...,
        ownership: str | None = ...,
    ) -> None: ...
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None
