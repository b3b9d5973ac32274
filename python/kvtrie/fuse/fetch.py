"""Fetch: the KV of all chunks of a request, leased on the first tier.

Cached chunks are loaded layer by layer while the caller computes. The caller computes each missing
chunk after the prefix, without the rest of the chunks, and commits it for all later requests. A
chunk with a failed load is computed too. Loads of the remaining chunks go on.
Invariant: all chunks are leased or none, each distinct chunk once. Cost: a lease per distinct
chunk, per layer a wait, and a gather per chunk read. No buffer in addition to the caller's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from kvtrie.errors import ConfigError, TransferError
from kvtrie.fuse.part import Part
from kvtrie.fuse.placement import check_room
from kvtrie.transfer.connector import LayerBuffer
from kvtrie.transfer.layerwise import LayerwiseEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Self

    from numpy.typing import NDArray

    from kvtrie import Scope
    from kvtrie.fuse.context import Chunk
    from kvtrie.fuse.names import Names
    from kvtrie.transfer import Executor

__all__ = ["Fetch"]


class Fetch:
    """The leased chunks of a request. `CacheStore.fetch_many` returns it.

    First compute the parts from `absent`, then call `wait` and `read` layer after layer. A single
    thread drives a fetch. `close` releases the leases.

    Args:
        executor: carries out the moves.
        names: the prefix, scope, names and sequences of the store's chunks.
        chunks: chunks of the request.
        place: called on close with the tokens of the chunks committed by `keep`.

    Attributes:
        parts: the distinct chunks, in the order of their first occurrence.
        order: for each requested chunk, the index of its part.
        prefix: the store's prefix as a part, None for an empty prefix.
        layers: layers of the model.
        closed: whether all leases are released.

    Raises:
        ConfigError: KV of a wrong number of layers, or a scope allowing holes in a sequence.
        NoSpaceError: the first tier has no room for all chunks. Nothing is leased then.
    """

    def __init__(
        self,
        executor: Executor,
        names: Names,
        chunks: Sequence[Chunk],
        *,
        place: Callable[[list[NDArray[np.int64]]], None],
    ) -> None:
        self._executor = executor
        self._names = names
        self._place = place
        self._engine = LayerwiseEngine.of(executor)
        self._pool = self._engine.connector.pool
        self.layers = self._engine.layers
        self._committed: list[Part] = []
        self._layer = -1
        self.closed = False
        numbers: dict[tuple[bytes, int], int] = {}
        parts: list[Part] = []
        order: list[int] = []
        for chunk in chunks:
            if chunk.kv is not None and len(chunk.kv) != self.layers:
                raise ConfigError(f"KV of {len(chunk.kv)} layers, the model has {self.layers}")
            name = (names.key(chunk.tokens), 0 if chunk.kv is None else id(chunk.kv))
            if name not in numbers:
                numbers[name] = len(parts)
                parts.append(self._part(chunk))
            order.append(numbers[name])
        self.parts = tuple(parts)
        self.order = tuple(order)
        self.prefix: Part | None = None
        if len(names.prefix):
            sequence = names.sequence(np.empty(0, dtype=np.int64))
            self.prefix = Part(names.prefix, b"", 0, sequence)
        self._stored = [part for part in self.parts if part.state != "given"]
        if self.prefix is not None:
            self._stored.insert(0, self.prefix)
        check_room(self._executor.manager, [part.sequence for part in self._stored])
        try:
            self._lease(self._stored)
            self._ahead(0)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def absent(self) -> Iterator[Part]:
        """Yield the parts to compute, the prefix first, each from its first token without KV.

        Write all layers of a part and `keep` it before taking the next part.

        Raises:
            ConfigError: the previous part was not kept.
            NoSpaceError: a load failed, and its room was taken by a concurrent request.
        """
        last: Part | None = None
        while True:
            left = (part for part in self._stored if part.state in ("absent", "lost"))
            if (part := next(left, None)) is None:
                return
            if part is last:
                raise ConfigError(f"write the {len(part.tokens)} tokens of this part and keep it")
            if self._finish_load(part):
                last = part
                yield part

    def past(self, part: Part, layer: int) -> LayerBuffer:
        """Return K and V of an absent part's sequence before `part.start`.

        Args:
            part: a part from `absent`.
            layer: the layer.

        Returns:
            K `(start, kv_heads, head_dim)` and V `(start, kv_heads, v_head_dim)`.
        """
        return self._gather(part, layer, 0, part.start)

    def write(self, part: Part, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store the computed K and V of an absent part at a layer.

        Args:
            part: a part from `absent`.
            layer: the layer.
            keys: K of `sequence[start:]`, `(len(sequence) - start, heads, dim)`, each rotated to
                its own position.
            values: V of the same tokens, in the same order.

        Raises:
            ConfigError: a wrong number of rows, or a part in state "hit" or "given".
        """
        wanted = len(part.sequence) - part.start
        if part.state not in ("absent", "lost") or part.rows is None:
            raise ConfigError(f"a part that is {part.state} is not written")
        if len(keys) != wanted or len(values) != wanted:
            raise ConfigError(f"{len(keys)} rows of K and {len(values)} of V, {wanted} wanted")
        rows, offsets = self._rows(part, layer, part.start, len(part.sequence))
        dtype = self._pool.keys.dtype
        self._pool.scatter(rows, offsets, keys.to(dtype), values.to(dtype))

    def keep(self, part: Part) -> None:
        """Commit a fully written part, so that all requests find it.

        Args:
            part: a part from `absent`.

        Raises:
            ConfigError: the part is in state "hit" or "given".
            NoSpaceError: a concurrent request has taken the room of the chunks waiting for this
                prefix. Close the fetch.
        """
        if part.lease is None or part.state not in ("absent", "lost"):
            raise ConfigError(f"a part that is {part.state} is not kept")
        if self._pool.device.type == "cuda":  # stores read on other streams
            torch.cuda.current_stream(self._pool.device).synchronize()
        lease = part.lease
        lease.commit(part.sequence[lease.matched :], now=self._executor.clock())
        part.state, part.start = "hit", len(part.sequence)
        self._committed.append(part)
        waiting = [one for one in self._stored if one.lease is None]
        if waiting:
            # A fork holds the prefix while the room reserved for the chunks is released.
            now = self._executor.clock()
            (part.lease,) = lease.fork(1, now=now)
            lease.release(now=now)
            self._lease(waiting)
            if self._layer < 0:
                self._ahead(0)
            else:  # some layers were waited for already, so load all layers again
                for one in waiting:
                    while one.state == "hit" and not self._finish_load(one):
                        pass
        self._executor.poll()

    def wait(self, layer: int) -> list[Part]:
        """Make the computation wait for a layer of all hits, and start loading the next layers.

        Args:
            layer: each layer once, ascending.

        Returns:
            Parts with failed loads. `absent` yields them too. Compute them before `read`.

        Raises:
            ConfigError: a part from `absent` is not kept yet, or this is not the next layer.
            NoSpaceError: a part has no room to be computed after its load failed.
        """
        if layer != self._layer + 1 or layer >= self.layers:
            raise ConfigError(f"layer {layer} of {self.layers} after layer {self._layer}")
        if any(part.state in ("absent", "lost") for part in self._stored):
            raise ConfigError("compute what `absent` yields first")
        self._layer = layer
        pending = [part for part in self._stored if part.loads is not None]
        while pending:
            self._ahead(layer)
            failed = self._bring(pending, self._engine.wanted(layer))
            again = self._lease_again(failed)
            pending = [part for part in again if part.state == "hit" and part.loads is not None]
        return [part for part in self._stored if part.state == "lost"]

    def read(
        self, part: Part, layer: int, out: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> LayerBuffer:
        """Return K and V of a part's own tokens at the awaited layer or an earlier layer.

        Args:
            part: the part.
            layer: the layer.
            out: K `(n, heads, head_dim)` and V to copy to, for example slices of a context's
                buffer. By default new tensors, or for a "given" part the tensors of its chunk.

        Returns:
            K `(n, kv_heads, head_dim)` and V `(n, kv_heads, v_head_dim)`.

        Raises:
            ConfigError: the layer was not awaited, or the fetch is closed.
        """
        if part.state == "given":
            buffer = LayerBuffer(*part.given[layer])
            if out is None:
                return buffer
            for target, source in zip(out, buffer, strict=True):
                target.copy_(source)
            return LayerBuffer(*out)
        if layer > self._layer and part.loads is not None:
            raise ConfigError(f"layer {layer} was not waited for: layer {self._layer} was last")
        return self._gather(part, layer, part.at, part.at + len(part.tokens), out)

    def close(self) -> None:
        """Release all leases and move committed chunks to the store's tier. Idempotent."""
        if self.closed:
            return
        self.closed = True
        parts = [part for part in self._stored if part is not self.prefix]
        try:
            for part in parts:
                self._release(part)
            self._place([part.tokens for part in self._committed if part is not self.prefix])
        finally:
            if self.prefix is not None:
                self._release(self.prefix)
            self._executor.poll()

    def _part(self, chunk: Chunk) -> Part:
        names = self._names
        key = names.key(chunk.tokens)
        if chunk.kv is not None:
            none = np.empty(0, dtype=np.int64)
            return Part(chunk.tokens, key, chunk.at, none, "given", given=chunk.kv)
        return Part(chunk.tokens, key, len(names.prefix), names.sequence(chunk.tokens))

    def _lease(self, parts: Sequence[Part]) -> None:
        """Lease parts, the prefix first. For an absent prefix, only reserve room for its chunks."""
        size = self._pool.block_tokens
        for part in parts:
            if part is not self.prefix and not self._prefix_resident():
                continue
            self._lease_one(part)
        if self.prefix in parts and not self._prefix_resident():
            assert self.prefix is not None  # noqa: S101 - only a store with a prefix gets here
            assert self.prefix.lease is not None  # noqa: S101 - leased above
            waiting = [part for part in self._stored if part.lease is None]
            front = len(self.prefix.tokens) // size * size
            room = sum(len(part.sequence) - front for part in waiting)
            room += len(self.prefix.sequence) - self.prefix.start
            self.prefix.lease.reserve(room, now=self._executor.clock())

    def _lease_one(self, part: Part) -> None:
        lease = self._engine.acquire(part.sequence, scope=self._scope(part), keep=0, load="all")
        part.lease = lease
        if len(lease.plan.recompute()):
            raise ConfigError(
                "chunks are kept whole: give the CacheStore a Scope with structure='leaf-only'"
            )
        part.loads = None if lease.ready() else self._engine.open(lease)
        part.start = lease.matched  # without the loads that failed before
        if part.start == len(part.sequence):
            part.state = "hit"
        part.see_origin(lease.plan, self._executor.manager)
        table = self._pool.table(lease.slots(0))
        blocks = len(part.sequence) // self._pool.block_tokens
        part.rows = table[:, :blocks]

    def _scope(self, part: Part) -> Scope:
        return self._names.scope_of(0 if part is self.prefix else len(part.tokens))

    def _prefix_resident(self) -> bool:
        """Return whether the full blocks of the prefix are cached or loading."""
        if self.prefix is None:
            return True
        size = self._pool.block_tokens
        front = len(self.prefix.tokens) // size * size
        return self.prefix.lease is not None and self.prefix.start >= front

    def _ahead(self, layer: int) -> None:
        """Start the loads of a layer and of the next `look_ahead` layers."""
        for part in self._stored:
            if part.loads is not None:
                part.loads.issue(self._engine.wanted(layer) + 1 + self._engine.look_ahead)
        self._engine.load.wake()

    def _bring(self, pending: Sequence[Part], layer: int) -> list[Part]:
        """Wait for a layer of parts in order, cancel failed loads, and return the failed parts."""
        failed: list[Part] = []
        for part in pending:
            assert part.loads is not None  # noqa: S101 - checked by the callers
            try:
                part.loads.wait(layer, self._engine.current)
            except TransferError:
                # Release its moves, so that parts waiting for them issue them again.
                self._engine.end(part.loads)
                part.loads = None
                failed.append(part)
        self._engine.load.wake()
        return failed

    def _lease_again(self, failed: Sequence[Part]) -> list[Part]:
        """Lease the failed parts again, and all parts with a match shortened by the same failure.

        A chunk also awaits the loads of the prefix, and may be the first to see one fail.

        Returns:
            The parts leased again.
        """
        if not failed:
            return []
        again = [part for part in self._stored if part in failed or not self._whole(part)]
        for part in again:
            self._release(part)
            part.state = "lost"
        self._lease(again)
        return again

    def _whole(self, part: Part) -> bool:
        """Return whether the lease still covers the tokens up to `part.start`."""
        return part.lease is not None and part.lease.matched >= part.start

    def _finish_load(self, part: Part) -> bool:
        """Load the cached tokens of a part. Return False if its state must be checked again."""
        if part.loads is None:
            return True
        pending = [one for one in self._stored if one.loads is not None and self._akin(one, part)]
        for one in pending:
            assert one.loads is not None  # noqa: S101 - only parts with loads are in `pending`
            one.loads.issue(self.layers)
        failed = self._bring(pending, self.layers - 1)
        if part in self._lease_again(failed):
            return False
        part.loads.finish()
        self._engine.end(part.loads)
        part.loads = None
        return True

    def _akin(self, one: Part, part: Part) -> bool:
        """Return whether `part` may wait for loads of `one`: the prefix, or a shared block."""
        size = self._pool.block_tokens
        edge = (part.at // size + 1) * size
        same = np.array_equal(one.sequence[:edge], part.sequence[:edge])
        return one is self.prefix or one is part or same

    def _release(self, part: Part) -> None:
        loads, lease = part.loads, part.lease
        part.loads = part.lease = part.rows = None
        try:
            if loads is not None:
                self._engine.end(loads)
        finally:
            if lease is not None:
                lease.release(now=self._executor.clock())

    def _rows(
        self, part: Part, layer: int, first: int, stop: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return slots of positions of a part's sequence at a layer, and offsets within slots."""
        if part.rows is None:
            raise ConfigError("the fetch is closed, or the part waits for its prefix")
        places = part.places.get((first, stop))
        if places is None:
            at = torch.arange(first, stop, device=part.rows.device)
            size = self._pool.block_tokens
            places = part.places[first, stop] = at // size, at % size
        blocks, offsets = places
        return part.rows[layer, blocks], offsets

    def _gather(
        self,
        part: Part,
        layer: int,
        first: int,
        stop: int,
        out: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> LayerBuffer:
        rows, offsets = self._rows(part, layer, first, stop)
        return LayerBuffer(*self._pool.gather(rows, offsets, out))
