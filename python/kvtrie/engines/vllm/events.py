"""KV events: what stands on host and on disk, as vLLM publishes it beside its own.

Hashes are kvtrie's content keys, equal in every process and after a restart; the tokens stand
beside them. Invariant: one event per block. Cost: an object per event.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvtrie.engines.vllm.announced import Change

__all__ = ["events_of"]

_MEDIUMS = (None, MEDIUM_CPU, MEDIUM_STORAGE)


def events_of(changes: Iterable[Change], block_tokens: int) -> Iterator[Any]:
    """vLLM's events of blocks that came or left.

    Args:
        changes: what the scheduler's half tells.
        block_tokens: tokens of a block.
    """
    for change in changes:
        medium = _MEDIUMS[change.tier]
        if change.stored:
            yield BlockStored(
                block_hashes=[change.key],
                parent_block_hash=change.parent,
                token_ids=change.tokens,
                block_size=block_tokens,
                lora_id=None,
                medium=medium,
                lora_name=None,
                locality="LOCAL",
            )
        else:
            yield BlockRemoved(block_hashes=[change.key], medium=medium, locality="LOCAL")
