"""KvtrieCachePolicy: kvtrie's order of eviction inside vLLM's own CPU manager.

`eviction_policy: "kvtrie"` of the `OffloadingConnector` selects it, and the plug-in registers it. A
request counts when it finishes. Then its new chunks enter the order after their predecessors,
unless eviction needs them earlier.
Invariant: `evict` returns the wanted number of chunks, none of them in use, or changes nothing.
Cost: a set operation per copied chunk, and a call of the core per request.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from itertools import chain, groupby
from operator import itemgetter
from typing import TYPE_CHECKING

from vllm.v1.kv_offload.cpu.policies.base import CachePolicy

from kvtrie.engines.server.boundary import Boundary
from kvtrie.engines.server.request_hints import FAR, RetainedRange, read_hints
from kvtrie.engines.vllm.hints import envelope_ranges
from kvtrie.tiers.key_order import KeyOrder

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vllm.v1.kv_offload.base import ReqContext
    from vllm.v1.kv_offload.cpu.policies.base import ChunkStatus

__all__ = ["KvtrieCachePolicy", "in_sequence"]

_LOG = logging.getLogger("vllm.kvtrie")  # below vLLM's logger, for its handlers
_WIDTH = 36  # bytes of a key: a SHA-256 hash and a group of layers
_OVER = RetainedRange(0, FAR, 0, None)  # the session of the request ends


class KvtrieCachePolicy(CachePolicy):
    """Chunks by key, and their order of eviction.

    Args:
        cache_capacity: chunks of the cache.

    Attributes:
        boundary: counts ignored hints, and requests without a recorded use.
    """

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self._chunks: dict[bytes, ChunkStatus] = {}
        self._order = KeyOrder(cache_capacity, width=_WIDTH)
        # Chunks outside the order, with the number of their store and their last token.
        self._new: dict[bytes, tuple[int, int]] = {}
        self._stores = 0
        self._storing: ReqContext | None = None  # the request of the next inserted chunks
        self._used: set[bytes] = set()  # ordered chunks in use by a copy
        self.boundary = Boundary("kvtrie", _LOG)

    def get(self, key: bytes) -> ChunkStatus | None:
        """Return the chunk of a key, or None."""
        return self._chunks.get(key)

    def insert(self, key: bytes, chunk: ChunkStatus, req_context: ReqContext | None = None) -> None:
        """Add a new chunk. From 0.33 on vLLM passes its request."""
        # vLLM does not call `on_store_miss` when it retries a store.
        if req_context is not None and req_context is not self._storing:
            self.on_store_miss((), req_context)
        self._chunks[key] = chunk
        at = 0 if self._storing is None else _position(key, self._storing)
        self._new[key] = (self._stores, at)

    def remove(self, key: bytes) -> None:
        """Forget a chunk after its store has failed."""
        del self._chunks[key]
        self._used.discard(key)
        if self._new.pop(key, None) is None:
            self._order.remove(key)

    def touch(self, keys: Iterable[bytes], req_context: ReqContext) -> None:
        """Record a use of chunks, in the order of their sequence."""
        with self.boundary.contained(req_context.req_id):
            self._note(in_sequence(keys, req_context), req_context)

    def on_store_miss(self, keys: Iterable[bytes], req_context: ReqContext) -> None:
        """Record the request of the next inserted chunks: they belong to its sequence."""
        del keys
        self._stores += 1
        self._storing = req_context

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[bytes]],
        insertion_only_keys: set[bytes],
        reused_keys: set[bytes],
        req_context: ReqContext,
    ) -> None:
        """Record a use of a finished request's chunks, and the end of its session."""
        del insertion_only_keys, reused_keys
        self.touch(chain(*key_groups), req_context)

    def evict(self, n: int, protected: set[bytes]) -> list[tuple[bytes, ChunkStatus]] | None:
        """Remove and return `n` chunks, or return None if fewer are evictable."""
        stay = self._used | protected
        gone = self._order.evict(n, stay)
        if gone is None and self._new:
            new = sorted((*at, key) for key, at in self._new.items())
            for _, rows in groupby(new, itemgetter(0)):
                self._enter([key for _, _, key in rows])
            gone = self._order.evict(n, self._used | protected)
        return None if gone is None else [(key, self._chunks.pop(key)) for key in gone]

    def clear(self) -> None:
        """Forget all chunks."""
        self._chunks.clear()
        self._order.clear()
        self._new.clear()
        self._used.clear()

    def mark_evictable(self, key: bytes) -> None:
        """Mark a chunk as no longer in use by a copy."""
        self._used.discard(key)

    def mark_non_evictable(self, key: bytes) -> None:
        """Mark a chunk as in use by a copy."""
        self._used.add(key)

    def _enter(self, keys: list[bytes]) -> None:
        """Count a request for resident chunks."""
        self._order.request(keys)
        for key in keys:
            if self._new.pop(key, None) is not None and self._chunks[key].ref_cnt:
                self._used.add(key)

    def _note(self, keys: Sequence[bytes], context: ReqContext) -> None:
        retained = context.get_state(_RetainedRanges)
        if retained is None:
            retained = self._ranges_of(context)
            context.set_state(retained)
        cached = [key for key in keys if key in self._chunks]
        self._enter(cached)
        for hint in retained.ranges:
            if hint == _OVER:
                if cached:
                    self._order.release(cached[-1])
                continue
            ends = map(context.get_offload_key_position, cached)
            inside = [
                key
                for key, end in zip(cached, ends, strict=True)
                if end is not None and hint.start < end <= hint.last
            ]
            self._order.keep(inside, hint.priority, hint.ttl_ns)

    def _ranges_of(self, context: ReqContext) -> _RetainedRanges:
        ranges: list[RetainedRange] = []
        ignored: list[str] = []
        if context.kv_hints is not None:
            ranges, ignored = envelope_ranges(context.kv_hints)
        given = read_hints(context.kv_transfer_params)
        ranges += [_OVER] * given.end + list(given.ranges)
        for why in (*ignored, *given.ignored):
            self.boundary.ignored(context.req_id, why)
        return _RetainedRanges(tuple(ranges))


def in_sequence(keys: Iterable[bytes], context: ReqContext) -> list[bytes]:
    """Return keys of a request in the order of their last tokens.

    A hit needs chunks of every group of layers. So all groups form a single sequence, and its end
    is evicted first in every group.
    """
    return sorted(keys, key=lambda key: _position(key, context))


def _position(key: bytes, context: ReqContext) -> int:
    """Return the index of a chunk's last token in a request."""
    return context.get_offload_key_position(key) or 0


@dataclass(frozen=True, slots=True)
class _RetainedRanges:
    """Ranges to retain for a request, stored with vLLM's request."""

    ranges: tuple[RetainedRange, ...]
