# Written by tests/served/stubs.py out of the installed package: do not edit.

from typing import Any
import torch

class SharedOffloadRegion:
    def __init__(
        self,
        engine_id: str,
        num_chunks: int,
        rank: int | None,
        kv_bytes_per_chunk: int,
        cpu_page_size: int,
        barrier: Any | None = ...,
        *,
        creator_memory_check: Any | None = ...,
        populate_shard: tuple[int, int] | None = ...,
        num_segments: int = ...,
    ) -> None: ...
    def create_next_worker_view(self, tensor_page_size: int) -> torch.Tensor: ...
    def cleanup(self) -> None: ...
    mmap_path: Any
    _creator: Any
