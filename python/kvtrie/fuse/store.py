"""CacheStore: KV of texts by their chunks, over the tiers of a manager.

A chunk's KV is computed directly after the store's prefix and reused at every occurrence of its
text. It is stored as the KV of the sequence prefix + chunk. The store is a thin layer: the manager
looks up, loads, keeps and evicts the blocks. Filler tokens complete the last block. They are
computed too and change no KV before them.
Invariant: a chunk is found only by the same tokens, prefix and tenant, and a found chunk is
complete. Cost: a lookup per chunk, and the manager's moves.
"""

from __future__ import annotations

from threading import RLock, get_ident
from typing import TYPE_CHECKING, Literal, TypeAlias
from weakref import WeakKeyDictionary

from kvtrie.errors import ConfigError
from kvtrie.fuse.context import Chunk, as_tokens
from kvtrie.fuse.fetch import Fetch
from kvtrie.fuse.lookup import ChunkFeedback, Found, Lookup, Miss
from kvtrie.fuse.names import Location, Names
from kvtrie.fuse.placement import check_place
from kvtrie.fuse.turns import in_turn
from kvtrie.model.shape import require_fingerprint
from kvtrie.settings.argument import few, instance, shown, word
from kvtrie.settings.hint import Demote
from kvtrie.settings.scope import Scope
from kvtrie.transfer import Executor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any

    import numpy as np
    from numpy.typing import NDArray

    from kvtrie import Committed, Eviction, Lease, Match
    from kvtrie.fuse.context import Tokens
    from kvtrie.fuse.part import Part

__all__ = ["CacheStore"]

Kind: TypeAlias = Literal["gpu", "host", "disk", "remote"]
"""Kind of a tier."""

_MOST_CHUNKS = 2**20


class CacheStore:
    """Chunks of texts with their KV.

    Args:
        executor: executor of the manager.
        chunker: cuts tokens into chunks, see `kvtrie.fuse.chunker`.
        prefix: tokens before every chunk when its KV is computed, for example a system prompt.
        scope: tenant and adapter of the chunks, and digests of non-token inputs by offset in each
            chunk, from offset 0 on.

    Attributes:
        executor: as given.
        prefix: int64 `(P,)`; K of a chunk is rotated to positions from P on.
        scope: as given. Its offsets count from a chunk's first token.
        tier: kind of the target tier for chunks computed in a `fetch_many`, after use. None leaves
            them on the first tier, subject to the tiers' write policies.

    Raises:
        ConfigError: the manager's model has no fingerprint, or the prefix has invalid tokens.
    """

    def __init__(
        self,
        executor: Executor,
        chunker: Callable[[Any], Iterable[Sequence[int] | NDArray[np.integer[Any]]]],
        *,
        prefix: Sequence[int] = (),
        scope: Scope | None = None,
    ) -> None:
        if not callable(chunker):
            raise ConfigError(f"chunker is {shown(chunker)}, a function that cuts tokens wanted")
        self.lock = RLock()
        self._driven: WeakKeyDictionary[Fetch, int] = WeakKeyDictionary()  # thread ids
        self.executor = instance("executor", executor, Executor)
        self._manager = executor.manager
        self._chunker = chunker
        require_fingerprint(self._manager.model, "a CacheStore")
        self.prefix = as_tokens("prefix", prefix)
        self.scope = Scope() if scope is None else instance("scope", scope, Scope)
        self.tier: Kind | None = None
        self._names = Names(
            self._manager.model.identity(), self.scope, self.prefix, self._manager.block_tokens
        )
        self._hits = dict.fromkeys((tier.kind for tier in self._manager.tiers), 0)
        self._wanted = 0
        self._chunks = 0
        self._missed = 0
        self._begin = executor.clock()
        self._before = self._manager.stats()

    def chunks(self, text: Any) -> list[NDArray[np.int64]]:  # noqa: ANN401 - input of the chunker
        """Cut a text into chunks with the store's chunker.

        Args:
            text: tokens, or any input of the chunker.

        Returns:
            The tokens of each chunk, int64 `(n,)`.

        Raises:
            ConfigError: the chunker returned invalid tokens.
        """
        return [as_tokens("chunk", chunk) for chunk in self._chunker(text)]

    def key(self, chunk: Tokens) -> bytes:
        """Return the name of a chunk, a 32-byte hash.

        The hash covers the model, the scope (tenant, adapter, digests within the chunk), the prefix
        and the chunk's tokens.

        Args:
            chunk: its tokens.

        Raises:
            ConfigError: invalid tokens.
        """
        return self._names.key(as_tokens("chunk", chunk))

    @in_turn
    def locations(self, key: bytes) -> list[Location]:
        """Return every copy of each block of a chunk, the fastest tier first.

        Args:
            key: its name, from any process.

        Returns:
            Empty for a chunk without cached blocks. A name not recently used in `lookup`,
            `fetch_many` or `insert` of this store is searched in all blocks of all tiers.
        """
        tokens = self._names.get(instance("key", key, bytes))
        if tokens is None:
            now = self.executor.clock()
            tiers = [at for at, tier in enumerate(self._manager.tiers) if not tier.layer_slots]
            tokens = self._names.recall(key, (self._manager.index(at, now=now) for at in tiers))
        if tokens is None:
            return []
        (match,) = self._matches([tokens])
        front = len(self.prefix) // self._manager.block_tokens
        return [
            Location(
                at,
                self._manager.tiers[copy.tier].kind,
                tuple(copy.slots.tolist()),
                (copy.layer_lo, copy.layer_hi),
            )
            for at, block in enumerate(match.blocks[front:])
            for copy in block.copies
        ]

    def scope_of(self, tokens: int) -> Scope:
        """Return the scope of the prefix and a chunk of `tokens` tokens, with shifted offsets."""
        return self._names.scope_of(tokens)

    def sequence(self, chunk: Tokens = ()) -> NDArray[np.int64]:
        """Return the stored tokens of a chunk: prefix, chunk, filler to a block's end.

        Args:
            chunk: its tokens, by default only the prefix.

        Returns:
            int64 `(blocks * block_tokens,)`.
        """
        return self._names.sequence(as_tokens("chunk", chunk))

    @in_turn
    def lookup(self, text: Any) -> Lookup:  # noqa: ANN401 - any input of the chunker
        """Look for every chunk of a text, on the fastest tier first. Nothing is moved or pinned."""
        chunks = self.chunks(text)
        found: list[Found] = []
        missed: list[Miss] = []
        size, offset = self._manager.block_tokens, len(self.prefix)
        sequences = [self.sequence(chunk) for chunk in chunks]
        for chunk, sequence, match in zip(chunks, sequences, self._matches(chunks), strict=True):
            key = self.key(chunk)
            self._names.remember(key, chunk)
            own = match.blocks[offset // size :]
            tiers = [block.copies[0].tier if block.copies else 0 for block in own]
            self._wanted += len(sequence) // size - offset // size
            for tier in tiers:
                self._hits[self._manager.tiers[tier].kind] += 1
            if match.tokens == len(sequence):
                kind = self._manager.tiers[max(tiers)].kind
                found.append(Found(chunk, key, kind, len(chunk)))
                continue
            cached = max(0, match.tokens - offset)
            missed.append(Miss(chunk, key, "partial" if cached else "absent", cached))
        self._chunks += len(chunks)
        self._missed += len(missed)
        return Lookup(found, missed)

    @in_turn
    def fetch_many(self, chunks: Iterable[Chunk | Tokens]) -> Fetch:
        """Lease all distinct chunks of a request at once and start their loads.

        Args:
            chunks: chunks, or their tokens. May be empty.

        Returns:
            The fetch, to read the chunks layer by layer. Close it when the request is fused. A
            single thread at a time drives the fetches of a store.

        Raises:
            ConfigError: an empty chunk, KV of a wrong number of layers, a scope allowing holes in a
                sequence, or an open fetch of a different thread.
            NoSpaceError: the first tier has no room for all chunks. Nothing is leased then.
        """
        me = get_ident()
        if others := sum(not one.closed and by != me for one, by in self._driven.items()):
            raise ConfigError(
                f"{others} fetches of this store are open in other threads: close them first, or "
                "let Fusor.fuse take turns"
            )
        listed = few("chunks", chunks, _MOST_CHUNKS)
        given = [one if isinstance(one, Chunk) else Chunk(one) for one in listed]
        fetch = Fetch(self.executor, self._names, given, place=self.place)
        self._driven[fetch] = me
        self._count(fetch.parts)
        return fetch

    @in_turn
    def fetch(self, chunk: Tokens, *, wait: bool = True) -> Lease:
        """Bring the sequence of a chunk to the first tier and hold it there.

        Args:
            chunk: its tokens.
            wait: block until the loads have ended. Otherwise poll `Lease.ready`.

        Returns:
            A lease of `sequence(chunk)`, to be released by the caller. `matched` is the number of
            its cached tokens.

        Raises:
            NoSpaceError: the first tier cannot hold it.
        """
        sequence = self.sequence(chunk)
        scope = self.scope_of(len(chunk))
        lease = self._manager.acquire(
            sequence, now=self.executor.clock(), scope=scope, keep=0, load="all"
        )
        try:
            self.executor.poll()
            if wait:
                self.executor.wait(lease)
        except BaseException:
            lease.release(now=self.executor.clock())
            raise
        return lease

    @in_turn
    def insert(self, lease: Lease, chunk: Tokens, tier: Kind | None = None) -> Committed:
        """Commit a chunk after its KV was written to the slots of a lease from `fetch`.

        Args:
            lease: lease from `fetch`. This call releases it, also on errors.
            chunk: the chunk's tokens. `sequence(chunk)` is written from `lease.matched` on.
            tier: kind of the target tier. None leaves the chunk on the first tier, subject to the
                tiers' write policies.

        Raises:
            ConfigError: the tier does not exist or has `write="never"`.
            NoSpaceError: the tier, or a tier on the way, has no room. Nothing is kept then.
        """
        now = self.executor.clock()
        size = self._manager.block_tokens
        front = len(self.prefix) // size
        prefix: Lease | None = None
        try:
            tokens = as_tokens("chunk", chunk)
            sequence = self.sequence(tokens)
            if tier is not None:
                (match,) = self._matches([tokens])
                blocks = len(sequence) // size - front
                check_place(self._manager, match.blocks[front:], blocks, tier)
            committed = lease.commit(sequence[lease.matched :], now=now)
            self._names.remember(self.key(tokens), tokens)
            if front and tier is not None:  # a lease keeps the prefix on its tier
                prefix = self._manager.acquire(
                    sequence[: front * size], now=now, scope=self.scope_of(0), keep=0, load="none"
                )
        finally:
            lease.release(now=now)
        try:
            self.place([chunk], tier)
        finally:
            if prefix is not None:
                prefix.release(now=now)
        self.executor.poll()
        return committed

    @in_turn
    def place(self, chunks: Iterable[Tokens], tier: Kind | None = None) -> None:
        """Demote cached chunks to a tier, one tier per step, as far as there is room.

        Leased blocks are not moved, so lease the prefix to keep it on its tier.

        Args:
            chunks: their tokens.
            tier: kind of the tier, by default `self.tier`. Nothing moves if both are None.
        """
        kind = self.tier if tier is None else tier
        if kind is not None:
            word("tier", kind, [each.kind for each in self._manager.tiers])
        if kind is None or kind == self._manager.tiers[0].kind:
            return
        hints = [
            Demote(tokens=self.sequence(chunk), tier=kind, scope=self.scope_of(len(chunk)))
            for chunk in chunks
        ]
        if hints:
            self._manager.hint(hints, now=self.executor.clock())

    def evictions(self, limit: int | None = None) -> list[Eviction]:
        """Return the manager's eviction log: block, tier, time, reason and target of each."""
        return self._manager.evictions(limit)

    @in_turn
    def feedback(self) -> ChunkFeedback:
        """Return hit rates, mean latencies and use of bandwidth since the store was created.

        All figures are measured, independent of the lanes' declared speeds.
        """
        stats = self._manager.stats().since(self._before)
        wanted = max(1, self._wanted)
        elapsed = max(1, self.executor.clock() - self._begin)
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

    def _count(self, parts: Iterable[Part]) -> None:
        """Count stored parts of a fetch as looked up chunks, for `feedback`."""
        size, offset = self._manager.block_tokens, len(self.prefix)
        for part in parts:
            if part.state == "given":
                continue
            self._names.remember(part.key, part.tokens)
            self._chunks += 1
            self._missed += part.state != "hit"
            self._wanted += len(part.sequence) // size - offset // size
            for kind, blocks in part.blocks.items():
                self._hits[kind] += blocks

    def _matches(self, chunks: Sequence[NDArray[np.int64]]) -> list[Match]:
        """Return the match of each chunk's sequence."""
        now = self.executor.clock()
        sequences = [self.sequence(chunk) for chunk in chunks]
        if not self.scope.extra:  # one scope, one call
            return self._manager.lookup_many(sequences, now=now, scope=self.scope, keep=0)
        return [
            self._manager.lookup(sequence, now=now, scope=self.scope_of(len(chunk)), keep=0)
            for sequence, chunk in zip(sequences, chunks, strict=True)
        ]
