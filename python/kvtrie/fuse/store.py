"""CacheStore: KV of texts by their chunks, over the tiers of a manager.

A chunk's KV is computed alone, behind nothing, and reused wherever its text comes again. The store
is a thin face: a chunk is a sequence under a scope of its own, and looking up, loading, keeping and
evicting are the manager's.
Invariant: a chunk is found only by its own tokens, under the same prefix and tenant, and what is
found is whole. Cost: a lookup per chunk; bytes move as the manager decides.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import numpy as np

from kvtrie.errors import ConfigError
from kvtrie.scope import Scope
from kvtrie.shape import require_fingerprint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any

    from numpy.typing import NDArray

    from kvtrie import Committed, Eviction, Lease
    from kvtrie.transfer import Executor

__all__ = ["CacheStore", "ChunkFeedback", "Found", "Lookup", "Miss"]

Kind: TypeAlias = Literal["gpu", "host", "disk", "remote"]
"""Kind of a tier."""

_LABEL = "chunk"


class Found(NamedTuple):
    """A chunk that is there.

    Attributes:
        chunk: its tokens.
        key: 32 bytes that name it.
        tier: kind of the slowest tier that a part of it must come from.
        tokens: how many of its tokens have KV: those of full blocks.
    """

    chunk: NDArray[np.int64]
    key: bytes
    tier: str
    tokens: int


class Miss(NamedTuple):
    """A chunk that must be computed.

    Attributes:
        chunk: its tokens.
        key: 32 bytes that name it.
        kind: "absent" if nothing of it is there, "partial" if only its first blocks are, "short" if
            it fills no block, which is never kept.
        tokens: how many of its tokens are there.
    """

    chunk: NDArray[np.int64]
    key: bytes
    kind: Literal["absent", "partial", "short"]
    tokens: int


class Lookup(NamedTuple):
    """What became of the chunks of a text.

    Attributes:
        found: those that are there.
        missed: those that must be computed.
    """

    found: list[Found]
    missed: list[Miss]


@dataclass(frozen=True, slots=True)
class ChunkFeedback:
    """How the store does, for whoever chooses how much to recompute.

    Attributes:
        hit_rate: by kind of tier, the share of all full blocks of the chunks looked up by this
            store that was found there, on the fastest of its tiers.
        fetch_ns: by kind of tier, the mean time of a load from there; 0 if there was none.
        bandwidth: by name of lane, the share of the time since the store was made in which the
            executor saw it carry something, for whomever.
        chunks: chunks that were looked up.
        missed: chunks that were not wholly there.
    """

    hit_rate: dict[str, float]
    fetch_ns: dict[str, float]
    bandwidth: dict[str, float]
    chunks: int
    missed: int


class CacheStore:
    """Chunks of texts with their KV.

    Args:
        executor: carries out the moves of the manager that holds the KV.
        chunker: cuts tokens into chunks; see `kvtrie.fuse.chunker`.
        prefix: tokens that stand before every chunk when its KV is computed, a system prompt say.
        scope: tenant and adapter whose chunks these are, and digests of what stands at tokens of
            each chunk without being one, 0 included.

    Raises:
        ConfigError: the manager's model has no fingerprint, or the prefix is not of tokens.
    """

    def __init__(
        self,
        executor: Executor,
        chunker: Callable[[Any], Iterable[Sequence[int] | NDArray[np.integer[Any]]]],
        *,
        prefix: Sequence[int] = (),
        scope: Scope | None = None,
    ) -> None:
        self._executor = executor
        self._manager = executor.manager
        self._chunker = chunker
        require_fingerprint(self._manager.model, "a CacheStore")
        base = scope or Scope()
        at_first = dict(base.extra).get(0, b"")  # one digest per token: this one goes into ours
        digest = _digest(_bytes("prefix", prefix), at_first)
        behind = ((at, one) for at, one in base.extra if at)
        self.scope = replace(base, extra=((0, digest), *behind))
        self._hits = dict.fromkeys((tier.kind for tier in self._manager.tiers), 0)
        self._wanted = 0
        self._chunks = 0
        self._missed = 0
        self._begin = executor.clock()
        self._before = self._manager.stats()

    def chunks(self, text: Any) -> list[NDArray[np.int64]]:  # noqa: ANN401 - whatever it cuts
        """What the chunker makes of a text."""
        return [np.asarray(chunk, dtype=np.int64) for chunk in self._chunker(text)]

    def key(self, chunk: Sequence[int] | NDArray[np.integer[Any]]) -> bytes:
        """The name of a chunk: a hash of all that decides what matches it.

        That is the model, the scope (tenant, adapter, digests within the chunk), the prefix and the
        chunk's tokens.
        """
        tokens = _bytes("chunk", chunk)
        extra = sorted((at, one) for at, one in self.scope.extra if at < len(chunk))
        digests = (part for at, one in extra for part in (at.to_bytes(8, "little"), one))
        owner = (self.scope.tenant, self.scope.lora.encode())
        return _digest(self._manager.model.identity().encode(), *owner, tokens, *digests)

    def lookup(self, text: Any) -> Lookup:  # noqa: ANN401 - whatever the chunker cuts
        """Look for every chunk of a text, on the fastest tier first. Nothing is moved or pinned."""
        chunks = self.chunks(text)
        matches = self._manager.lookup_many(
            chunks, now=self._executor.clock(), scope=self.scope, keep=0
        )
        found: list[Found] = []
        missed: list[Miss] = []
        size = self._manager.block_tokens
        for chunk, match in zip(chunks, matches, strict=True):
            full = len(chunk) // size * size
            tiers = [block.copies[0].tier if block.copies else 0 for block in match.blocks]
            self._wanted += full // size
            for tier in tiers:
                self._hits[self._manager.tiers[tier].kind] += 1
            if full and match.tokens == full:
                kind = self._manager.tiers[max(tiers)].kind
                found.append(Found(chunk, self.key(chunk), kind, full))
                continue
            why: Literal["absent", "partial", "short"] = "partial" if match.tokens else "absent"
            missed.append(Miss(chunk, self.key(chunk), why if full else "short", match.tokens))
        self._chunks += len(chunks)
        self._missed += len(missed)
        return Lookup(found, missed)

    def fetch(self, chunk: Sequence[int] | NDArray[np.integer[Any]], *, wait: bool = True) -> Lease:
        """Bring a chunk to the first tier and hold it there.

        Args:
            chunk: its tokens.
            wait: block until it is there; otherwise the copies run, and `Lease.ready` tells.

        Returns:
            A lease, which the caller releases; `matched` tells how much of the chunk it has.

        Raises:
            NoSpaceError: the first tier cannot hold it.
        """
        lease = self._manager.acquire(
            np.asarray(chunk), now=self._executor.clock(), scope=self.scope, keep=0, load="all"
        )
        try:
            self._executor.poll()
            if wait:
                self._executor.wait(lease)
        except BaseException:
            lease.release(now=self._executor.clock())
            raise
        return lease

    def insert(
        self,
        lease: Lease,
        chunk: Sequence[int] | NDArray[np.integer[Any]],
        tier: Kind | None = None,
    ) -> Committed:
        """Keep a chunk whose KV the caller has written to the slots of a lease from `fetch`.

        Args:
            lease: what `fetch` gave; released by this call, also by one that fails.
            chunk: the chunk's tokens.
            tier: kind of the tier where it is to stand: the first or the second one; None leaves it
                on the first, and the rest to the tiers' write policies.

        Raises:
            ConfigError: a tier that is neither of the two.
        """
        kinds = [one.kind for one in self._manager.tiers[:2]]
        now = self._executor.clock()
        try:
            if tier is not None and tier not in kinds:
                raise ConfigError(f"a chunk is inserted into {' or '.join(kinds)}, not {tier!r}")
            committed = lease.commit(np.asarray(chunk)[lease.matched :], now=now)
            if tier is not None and tier != kinds[0]:
                lease.suspend(to=tier, now=now)
        finally:
            lease.release(now=now)
        self._executor.poll()
        return committed

    def evictions(self, limit: int | None = None) -> list[Eviction]:
        """The manager's eviction log: what left which tier, when, why, and where to."""
        return self._manager.evictions(limit)

    def feedback(self) -> ChunkFeedback:
        """Hit rates, mean latencies and use of bandwidth, since the store was made.

        All of it was seen: no figure depends on what the lanes were declared to do.
        """
        stats = self._manager.stats().since(self._before)
        wanted = max(1, self._wanted)
        elapsed = max(1, self._executor.clock() - self._begin)
        return ChunkFeedback(
            hit_rate={kind: hits / wanted for kind, hits in self._hits.items()},
            fetch_ns={
                kind: tier.load_time.sum / max(1, tier.load_time.count)
                for kind, tier in stats.tiers.items()
            },
            bandwidth={
                name: min(1.0, lane.busy_ns / elapsed) for name, lane in stats.lanes.items()
            },
            chunks=self._chunks,
            missed=self._missed,
        )


def _bytes(name: str, tokens: Sequence[int] | NDArray[np.integer[Any]]) -> bytes:
    """Tokens as they are hashed."""
    given = np.asarray(tokens)
    if not given.size:
        return b""
    if given.dtype.kind not in "iu" or given.min() < 0 or given.max() >= 2**32:
        raise ConfigError(f"a {name} is of tokens, integers from 0 to 2**32 - 1, not {tokens!r}")
    return given.astype("<u4").tobytes()


def _digest(*parts: bytes) -> bytes:
    """A hash of parts that cannot be cut in another way."""
    digest = hashlib.blake2b(digest_size=32, person=_LABEL.encode())
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()
