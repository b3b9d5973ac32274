# Written by tests/served/stubs.py out of the installed package: do not edit.

from enum import Enum
from typing import Any
from vllm.lora.request import LoRARequest
from vllm.v1.kv_hints import KvHintsEnvelope
import torch

class Request:
    request_id: str
    @property
    def num_tokens(self) -> int: ...
    num_prompt_tokens: Any
    num_computed_tokens: Any
    all_token_ids: Any
    block_hashes: list[Any]
    status: Any
    prompt_embeds: torch.Tensor | None
    skip_reading_prefix_cache: Any
    lora_request: LoRARequest | None
    mm_features: Any
    cache_salt: str | None
    kv_transfer_params: dict[str, Any] | None
    kv_hints: KvHintsEnvelope | None
    session_id: str | None
    priority: int
    @classmethod
    def from_engine_core_request(cls, request: Any, block_hasher: Any | None) -> Request: ...

class RequestStatus(Enum):
    PREEMPTED = ...
