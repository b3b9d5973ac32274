# Written by tests/served/stubs.py out of the installed package: do not edit.

from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.base_prefix_cache import InsertResult
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.base_prefix_cache import MatchResult
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from typing import Any

class MambaComponent:
    def __init__(self, cache: Any, params: CacheInitParams) -> None: ...
    tree_core: Any | None
    mamba_checkpoint_grid: Any
    def finalize_match_result_in_cache(
        self,
        params: MatchPrefixParams,
        result: MatchResult,
    ) -> MatchResult: ...
    def prepare_for_caching_req(
        self,
        req: Any,
        insert_params: InsertParams,
        token_ids_len: int,
        is_finished: bool,
    ) -> int | None: ...
    def cleanup_after_caching_req(
        self,
        req: Any,
        is_finished: bool,
        insert_result: InsertResult | None = ...,
        insert_params: InsertParams | None = ...,
    ) -> None: ...
