"""KvtrieCachePolicy: kvtrie's order of eviction inside vLLM's own CPU manager.

`eviction_policy: "kvtrie"` of the `OffloadingConnector` names it; the plug-in registers it. Keys
are opaque: what is known of one is where it stood in requests, and the hints of these.
Invariant: `evict` gives as many chunks as were asked for, or changes nothing. Cost: that of
`OpaqueOrder`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from vllm.v1.kv_offload.cpu.policies.base import CachePolicy

from kvtrie.engines.asked import FAR, Kept, asked_of
from kvtrie.engines.boundary import Boundary
from kvtrie.engines.vllm.envelope import kept_of
from kvtrie.tiers.opaque_order import OpaqueOrder

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vllm.v1.kv_offload.base import ReqContext
    from vllm.v1.kv_offload.cpu.policies.base import ChunkStatus

__all__ = ["KvtrieCachePolicy"]

_LOG = logging.getLogger("vllm.kvtrie")  # whose lines vLLM shows


class KvtrieCachePolicy(CachePolicy):
    """Chunks by key, and which of them leave first.

    Args:
        cache_capacity: chunks of the cache.

    Attributes:
        boundary: counts ignored hints and requests whose use was not noted.
    """

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self._chunks: dict[bytes, ChunkStatus] = {}
        self._order = OpaqueOrder()
        self.boundary = Boundary("kvtrie", _LOG)

    def get(self, key: bytes) -> ChunkStatus | None:
        """The chunk of a key, or None."""
        return self._chunks.get(key)

    def insert(self, key: bytes, chunk: ChunkStatus) -> None:
        """Take a new chunk in."""
        self._chunks[key] = chunk
        self._order.add(key, free=chunk.ref_cnt == 0)

    def remove(self, key: bytes) -> None:
        """Forget a chunk whose store has failed."""
        del self._chunks[key]
        self._order.remove(key)

    def touch(self, keys: Iterable[bytes], req_context: ReqContext) -> None:
        """Note a use of chunks, in the order of their sequence."""
        with self.boundary.contained(req_context.req_id):
            self._note(list(keys), req_context)

    def on_store_miss(self, keys: Iterable[bytes], req_context: ReqContext) -> None:
        """Nothing: chunks that are not there have no place in the order."""

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[bytes]],
        insertion_only_keys: set[bytes],
        reused_keys: set[bytes],
        req_context: ReqContext,
    ) -> None:
        """Note where a request's chunks stand; those that it only stored count no further use."""
        del reused_keys
        for keys in key_groups:
            with self.boundary.contained(req_context.req_id):
                self._note(keys, req_context, stored=insertion_only_keys)

    def evict(self, n: int, protected: set[bytes]) -> list[tuple[bytes, ChunkStatus]] | None:
        """Take `n` chunks out, or None if fewer may leave."""
        gone = cast("list[bytes] | None", self._order.victims(n, protected))
        return None if gone is None else [(key, self._chunks.pop(key)) for key in gone]

    def clear(self) -> None:
        """Forget all chunks."""
        self._chunks.clear()
        self._order.clear()

    def mark_evictable(self, key: bytes) -> None:
        """No copy uses the chunk any more."""
        self._order.hold(key, free=True)

    def mark_non_evictable(self, key: bytes) -> None:
        """A copy uses the chunk."""
        self._order.hold(key, free=False)

    def _note(
        self,
        keys: Sequence[bytes],
        context: ReqContext,
        stored: set[bytes] | None = None,
    ) -> None:
        asked = context.get_state(_Asked)
        if asked is None:
            asked = self._asked_of(context)
            context.set_state(asked)
        behind, before = None, 0
        for key in keys:
            end = context.get_offload_key_position(key)
            self._order.use(key, count=stored is None or key not in stored)
            self._order.place(key, before, behind)
            for hint in asked.kept:
                if end is not None and hint.start < end <= hint.last:
                    self._order.keep(key, hint.priority, hint.ttl_ns)
            behind, before = key, before if end is None else end

    def _asked_of(self, context: ReqContext) -> _Asked:
        kept: list[Kept] = []
        strange: list[str] = []
        if context.kv_hints is not None:
            kept, strange = kept_of(context.kv_hints)
        asked = asked_of(context.kv_transfer_params)
        kept += [Kept(0, FAR, 0, None)] * asked.end + list(asked.kept)
        for why in (*strange, *asked.strange):
            self.boundary.ignored(context.req_id, why)
        return _Asked(tuple(kept))


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a request asks to be kept; vLLM carries it with the request."""

    kept: tuple[Kept, ...]
