"""RemoteStorage: the storage of the `remote` tier, over any store that a back end reaches.

It names blocks, makes and verifies checksums, keeps beliefs, and stops calling a store that fails.
Invariant: a block is returned only under its own name, with every requested layer proved; anything
else is a miss with a counted reason; nothing waits beyond the deadline of a call that the back end
honours. Cost: one hash of all bytes per read and per write, without the interpreter's lock.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from kvtrie.errors import ConfigError, TransferError
from kvtrie.shape import require_fingerprint
from kvtrie.tiers.block_format import BlockFormat
from kvtrie.tiers.remote.beliefs import Beliefs
from kvtrie.tiers.remote.counts import Counts
from kvtrie.tiers.remote.form import value_format
from kvtrie.tiers.remote.guarded import GuardedStore
from kvtrie.tiers.remote.open import read_secret
from kvtrie.tiers.remote.search import known_blocks, search
from kvtrie.tiers.remote.url import RemoteUrl
from kvtrie.tiers.remote.values import get_values, put_values

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Self

    from numpy.typing import NDArray

    from kvtrie._kvtrie import ValueFormat
    from kvtrie.layout import Layout
    from kvtrie.shape import ModelShape
    from kvtrie.tier import Tier
    from kvtrie.tiers.remote.counts import RemoteStats
    from kvtrie.tiers.remote.protocol import RemoteStore, Result
    from kvtrie.tiers.remote.search import Answer, Found
    from kvtrie.tiers.remote.values import ReadBlock, WrittenBlock

__all__ = ["RemoteStorage"]

_LOG = logging.getLogger(__name__)
_NS = 1_000_000_000
_PATIENCE_NS = 30 * _NS  # of a call without a deadline


class RemoteStorage:
    """The blocks of one rank in a shared store.

    Args:
        url: where the store is; see `kvtrie.tiers.remote`.
        model: the shape whose KV is kept; its `fingerprint` may not be empty.
        block_tokens: tokens per block.
        layout: layout of a layer of a block in the pools; None is kvtrie's default.
        rank: the tensor-parallel rank whose part of the KV this is.
        ranks: how many there are. Latent KV is equal on all ranks, which share its blocks.
        secret: keys names and checksums, so that other users of the store can neither find nor
            replace blocks unnoticed.
        trust_s: seconds for which a belief is used without asking the store again.
        lookup: "all" asks the store, "local" uses only what this process has written or read.
        store: the store, if it is open already.
        form: names and checksums, if they are not those of `rank` of `ranks`.
        clock: nanoseconds, as `time.monotonic_ns`.

    Attributes:
        block_format: format of the bytes.
        form: names and checksums.
        url: where the store is.
        breaker: the circuit breaker.

    Raises:
        ConfigError: a model without a fingerprint, a layout with K and V apart, a bad URL; a store
            that is unreachable, with `strict=1` in the URL.
    """

    def __init__(
        self,
        url: str | RemoteUrl,
        model: ModelShape,
        block_tokens: int,
        *,
        layout: Layout | None = None,
        rank: int = 0,
        ranks: int = 1,
        secret: bytes | None = None,
        trust_s: float = 60.0,
        lookup: Literal["all", "local"] = "all",
        store: RemoteStore | None = None,
        form: ValueFormat | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.url = url if isinstance(url, RemoteUrl) else RemoteUrl.parse("a remote URL", url)
        require_fingerprint(model, f"the remote store {self.url}")
        self.block_format = BlockFormat.of(model, layout, block_tokens)
        self.form = form or value_format(model, self.block_format, secret, rank=rank, ranks=ranks)
        self._beliefs = Beliefs(trust_s, clock)
        self._local = lookup == "local"
        self._clock = clock
        self._counts = Counts()
        self._store = GuardedStore(self.url, self.form, clock, store)
        self.breaker = self._store.breaker

    @classmethod
    def of_tier(
        cls, model: ModelShape, tier: Tier, block_tokens: int, *, rank: int = 0, ranks: int = 1
    ) -> Self:
        """The storage that a tier asks for.

        Args:
            model: the shape whose KV is kept.
            tier: its path, layout, secret, trust and lookup.
            block_tokens: tokens per block.
            rank: the tensor-parallel rank whose part of the KV this is.
            ranks: how many there are.

        Raises:
            ConfigError: a tier without a path, or with layer slots; as of the class.
        """
        if tier.path is None:
            raise ConfigError("a remote tier with a store needs a path")
        if tier.layer_slots:
            raise ConfigError(
                "a remote store keeps a block's layers in one value: layer_slots=False"
            )
        return cls(
            RemoteUrl.parse("path of tier 'remote'", tier.path),
            model,
            block_tokens,
            layout=tier.layout,
            rank=rank,
            ranks=ranks,
            secret=None if tier.secret_file is None else read_secret(tier.secret_file),
            trust_s=60.0 if tier.trust_s is None else tier.trust_s,
            lookup=tier.lookup or "all",
        )

    def read(self, key: bytes, slot: int, layers: tuple[int, int], memory: torch.Tensor) -> None:
        """Fill `memory` with layers `[lo, hi)` of the block `key`, proved.

        Raises:
            TransferError: the block could not be read.
        """
        host = memory if memory.device.type == "cpu" else torch.empty_like(memory, device="cpu")
        (why,) = self.read_many([(key, slot, layers, host)])
        if why is not None:
            raise TransferError(why)
        if host is not memory:
            memory.copy_(host)

    def write(
        self, key: bytes, slot: int, layers: tuple[int, int], memory: torch.Tensor, label: bytes
    ) -> None:
        """Store the block `key`, unless the store has it.

        Raises:
            TransferError: the block could not be written.
        """
        (why,) = self.write_many([(key, slot, layers, memory.cpu(), label)])
        if why is not None:
            raise TransferError(why)

    def read_many(
        self, blocks: Sequence[ReadBlock], *, deadline: int | None = None
    ) -> list[str | None]:
        """Read blocks as `read` does, given as its arguments, all by one deadline.

        Args:
            blocks: keys, slots (which mean nothing here), layers, and memory of the host.
            deadline: nanoseconds of the clock; None is 30 s from now.

        Returns:
            For each block the reason of its failure, or None.
        """
        names = self._names([key for key, *_ in blocks])
        until = self._until(deadline)

        def get(store: RemoteStore) -> list[Result]:
            return get_values(store, self.form, names, blocks, deadline=until)

        found = self._store.call("get", len(blocks), get)
        damaged = [name for name, one in zip(names, found, strict=True) if one.outcome == "damaged"]
        if damaged:
            # A put writes only what is absent, so a damaged value would stay for ever.
            _LOG.warning("%s: %d damaged values are removed", self.url, len(damaged))
            self._store.call("remove", len(damaged), lambda at: at.remove_many(damaged, until))
        for name, block, result in zip(names, blocks, found, strict=True):
            if result.outcome == "ok":
                self._beliefs.confirm(name)
                self._counts.transferred(read=block[3].nbytes)
            elif result.outcome in {"missing", "damaged"}:
                self._refute(name)
            else:
                self._beliefs.forget(name)
        self._counts.results("get", found)
        return _reasons(found)

    def write_many(
        self, blocks: Sequence[WrittenBlock], *, deadline: int | None = None
    ) -> list[str | None]:
        """Write blocks as `write` does, given as its arguments, all by one deadline.

        Args:
            blocks: keys, slots (which mean nothing here), layers, memory of the host, labels.
            deadline: nanoseconds of the clock; None is 30 s from now.

        Returns:
            For each block the reason of its failure, or None.
        """
        names = self._names([key for key, *_ in blocks])
        until = self._until(deadline)

        layers = self.block_format.layers

        def put(store: RemoteStore) -> list[Result]:
            return put_values(store, self.form, names, blocks, layers=layers, deadline=until)

        found = self._store.call("put", len(blocks), put)
        for name, block, result in zip(names, blocks, found, strict=True):
            if result.outcome == "ok":
                self._beliefs.confirm(name)
                self._counts.transferred(written=block[3].nbytes)
        self._counts.results("put", found)
        return _reasons(found)

    def find(
        self,
        keys: NDArray[np.uint8],
        deadline: int,
        forms: Sequence[ValueFormat] | None = None,
    ) -> Found:
        """Ask the store for the blocks of a sequence, until one is missing.

        Args:
            keys: content keys `(blocks, 32)`, as `BlockManager.keys` has them.
            deadline: nanoseconds of the clock.
            forms: formats of all ranks, each of which must have its part of a block; None is this
                rank's.
        """
        names = [self._names(keys, form) for form in forms or [self.form]]
        rows = list(zip(*names, strict=True))
        if self._local:
            return known_blocks(rows, self._beliefs)
        return search(rows, self._beliefs, lambda unknown: self._ask(unknown, deadline))

    def refute(self, keys: Sequence[bytes], forms: Sequence[ValueFormat] | None = None) -> None:
        """Note that blocks, which another process of the server read, could not be read.

        Args:
            keys: content keys.
            forms: formats of all ranks; None is this rank's.
        """
        for form in forms or [self.form]:
            for name in self._names(keys, form):
                self._refute(name)

    def forget(self) -> None:
        """Drop all beliefs; the store keeps its blocks."""
        self._beliefs.clear()

    def count_dropped(self, blocks: int) -> None:
        """Count blocks that were evicted before the store had them."""
        self._counts.dropped(blocks)

    def stats(self) -> RemoteStats:
        """The counters now."""
        return self._counts.stats(self.breaker)

    def close(self) -> None:
        """Release the store's connections. Closing twice does nothing."""
        self._store.close()

    def _ask(self, names: Sequence[bytes], deadline: int) -> dict[bytes, Answer]:
        """The store's answer about each name."""
        if not names:
            return {}
        found = self._store.call(
            "exists", len(names), lambda store: store.exists_many(names, deadline)
        )
        self._counts.results("exists", found)
        answers: dict[bytes, Answer] = {}
        for name, result in zip(names, found, strict=True):
            if result.outcome == "ok":
                self._beliefs.report(name)
                answers[name] = "ok"
            elif result.outcome in {"missing", "damaged"}:
                believed = self._beliefs.seen(name)
                answers[name] = "refuted" if believed else "missing"
                if believed:
                    self._refute(name)
            else:
                answers[name] = "late"
        return answers

    def _names(
        self, keys: Sequence[bytes] | NDArray[np.uint8], form: ValueFormat | None = None
    ) -> list[bytes]:
        if not isinstance(keys, np.ndarray):
            keys = np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(-1, 32)
        names = (form or self.form).names(keys).tobytes()
        return [names[at : at + 32] for at in range(0, len(names), 32)]

    def _until(self, deadline: int | None) -> int:
        return self._clock() + _PATIENCE_NS if deadline is None else deadline

    def _refute(self, name: bytes) -> None:
        if self._beliefs.refute(name):
            self._counts.refuted()


def _reasons(found: Sequence[Result]) -> list[str | None]:
    return [None if one.outcome == "ok" else f"{one.outcome}: {one.reason}" for one in found]
