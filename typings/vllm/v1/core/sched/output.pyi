# Written by tests/served/stubs.py out of the installed package: do not edit.

from dataclasses import dataclass
from typing import Any

@dataclass(init=False)
class SchedulerOutput:
    scheduled_new_reqs: list[NewRequestData]
    scheduled_cached_reqs: CachedRequestData
    scheduled_spec_decode_tokens: dict[str, list[int]]
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    kv_connector_block_state: KVConnectorBlockState | None

@dataclass(init=False)
class KVConnectorBlockState:
    boundary_state_offloads: dict[str, list[tuple[int, int, int]]]

@dataclass(init=False)
class NewRequestData:
    req_id: str
    num_computed_tokens: int

@dataclass(init=False)
class CachedRequestData:
    req_ids: list[str]
    new_block_ids: list[tuple[list[int], ...] | None]
    num_computed_tokens: list[int]
