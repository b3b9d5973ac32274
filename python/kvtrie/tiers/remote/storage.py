"""RemoteStorage: the storage of the `remote` tier, over any store that a back end reaches.

It names blocks, makes and verifies checksums, keeps beliefs, and stops calling a store that fails.
Invariant: a block is returned only under its own name, with every requested layer proved; anything
else is a miss with a counted reason; nothing waits beyond the deadline of a call that the back end
honours. Cost: one hash of all bytes per read and per write, without the interpreter's lock.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch

from kvtrie._kvtrie import ValueFormat
from kvtrie.errors import ConfigError, TransferError
from kvtrie.shape import require_fingerprint
from kvtrie.tiers.block_format import BlockFormat
from kvtrie.tiers.remote.beliefs import Beliefs
from kvtrie.tiers.remote.breaker import Breaker
from kvtrie.tiers.remote.open import open_store, read_secret
from kvtrie.tiers.remote.protocol import Get, Put, Result
from kvtrie.tiers.remote.url import RemoteUrl

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Self

    from numpy.typing import NDArray

    from kvtrie.layout import Layout
    from kvtrie.shape import ModelShape
    from kvtrie.tier import Tier
    from kvtrie.tiers.remote.protocol import Outcome, RemoteStore

__all__ = ["Found", "RemoteStats", "RemoteStorage"]

_LOG = logging.getLogger(__name__)
_NS = 1_000_000_000
_PATIENCE_NS = 30 * _NS  # of a call without a deadline
_ASKED_FIRST = 64  # names of the first question; most prompts differ early
_ASKED_MOST = 1024


class Found(NamedTuple):
    """Answer of a store about the blocks of a sequence.

    Attributes:
        blocks: leading blocks that the store has.
        asked: names that it was asked for.
        refuted: blocks that were believed to be there and are not.
        late: names without an answer by the deadline.
    """

    blocks: int
    asked: int
    refuted: int
    late: int


@dataclass(frozen=True, slots=True)
class RemoteStats:
    """Counters of a remote storage since it was opened.

    Attributes:
        results: blocks by operation ("get", "put", "exists") and outcome.
        bytes_read: bytes of verified layers.
        bytes_written: bytes of values that are in the store after a put.
        breaker: state of the circuit breaker.
        refuted: beliefs that turned out to be wrong.
        dropped: blocks that were evicted before the store had them, by the outcome of the latest
            put that failed, or `late` if none did.
    """

    results: dict[tuple[str, Outcome], int]
    bytes_read: int
    bytes_written: int
    breaker: Literal["closed", "open", "probing"]
    refuted: int
    dropped: dict[Outcome, int]


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
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.url = url if isinstance(url, RemoteUrl) else RemoteUrl.parse("a remote URL", url)
        strict = self.url.strict
        require_fingerprint(model, f"the remote store {self.url}")
        self.block_format = BlockFormat.of(model, layout, block_tokens)
        self.form = value_format(model, self.block_format, secret, rank=rank, ranks=ranks)
        self.breaker = Breaker(clock)
        self._beliefs = Beliefs(trust_s, clock)
        self._local = lookup == "local"
        self._clock = clock
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        self._results: Counter[tuple[str, Outcome]] = Counter()
        self._bytes = [0, 0]
        self._refuted = 0
        self._dropped: Counter[Outcome] = Counter()
        self._why_not: Outcome = "late"  # the reason why blocks are not written
        self._closed = False
        self._store = store
        if store is None:
            try:
                self._open()
            except TransferError as error:
                if strict:
                    raise ConfigError(f"{self.url} is unreachable: {error}") from error
                _LOG.warning("%s is unreachable, a probe follows: %s", self.url, error)
                self.breaker.open()

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
        self,
        blocks: Sequence[tuple[bytes, int, tuple[int, int], torch.Tensor]],
        *,
        deadline: int | None = None,
    ) -> list[str | None]:
        """Read blocks as `read` does, given as its arguments, all by one deadline.

        Args:
            blocks: keys, slots (which mean nothing here), layers, and memory of the host.
            deadline: nanoseconds of the clock; None is 30 s from now.

        Returns:
            For each block the reason of its failure, or None.
        """
        names = self._names([key for key, *_ in blocks])
        form = self.form
        headers = [torch.empty(form.header_bytes, dtype=torch.uint8).numpy() for _ in blocks]
        rows = [
            Get(name, layers, header, memory.numpy())
            for name, header, (_, _, layers, memory) in zip(names, headers, blocks, strict=True)
        ]
        until = self._until(deadline)
        found = self._call("get", len(rows), lambda store: store.get_many(rows, until))
        read = [at for at, result in enumerate(found) if result.outcome == "ok"]
        proofs = form.verify(
            [(blocks[at][0], headers[at], blocks[at][2], rows[at].memory) for at in read]
        )
        for at, why in zip(read, proofs, strict=True):
            if why is not None:
                found[at] = Result("damaged", why)
        damaged = [name for name, one in zip(names, found, strict=True) if one.outcome == "damaged"]
        if damaged:
            # A put writes only what is absent, so a damaged value would stay for ever.
            _LOG.warning("%s: %d damaged values are removed", self.url, len(damaged))
            self._call("remove", len(damaged), lambda store: store.remove_many(damaged, until))
        for name, row, result in zip(names, rows, found, strict=True):
            if result.outcome == "ok":
                self._beliefs.confirm(name)
                self._count_bytes(0, row.memory.nbytes)
            elif result.outcome in {"missing", "damaged"}:
                self._refute(name)
            else:
                self._beliefs.forget(name)
        self._count("get", found)
        return _reasons(found)

    def write_many(
        self,
        blocks: Sequence[tuple[bytes, int, tuple[int, int], torch.Tensor, bytes]],
        *,
        deadline: int | None = None,
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

        def put(store: RemoteStore) -> list[Result]:
            return self._put(store, names, blocks, until)

        found = self._call("put", len(blocks), put)
        for name, block, result in zip(names, blocks, found, strict=True):
            if result.outcome == "ok":
                self._beliefs.confirm(name)
                self._count_bytes(1, block[3].nbytes)
        self._count("put", found)
        failed = [one for one in found if one.outcome != "ok"]
        self._why_not = failed[-1].outcome if failed else "late"
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
            return Found(_leading(all(map(self._beliefs.seen, row)) for row in rows), 0, 0, 0)
        blocks, asked, refuted, late, size = 0, 0, 0, 0, _ASKED_FIRST
        while blocks < len(rows):
            part = rows[blocks : blocks + size]
            kinds = {name: self._beliefs.kind(name) for row in part for name in row}
            usable = _leading(all(kinds[name] != "refuted" for name in row) for row in part)
            unknown = [name for row in part[:usable] for name in row if kinds[name] == "unknown"]
            answers = self._ask(unknown, deadline)
            there = {name for name in kinds if kinds[name] in {"confirmed", "reported"}}
            there.update(name for name, found in answers.items() if found == "ok")
            count = _leading(there.issuperset(row) for row in part[:usable])
            asked += len(unknown)
            refuted += sum(found == "refuted" for found in answers.values())
            late += sum(found == "late" for found in answers.values())
            blocks += count
            if count < len(part):
                refuted += count == usable
                break
            size = min(2 * size, _ASKED_MOST)
        return Found(blocks, asked, refuted, late)

    def count_dropped(self, blocks: int) -> None:
        """Count blocks that were evicted before the store had them."""
        with self._lock:
            self._dropped[self._why_not] += blocks

    def stats(self) -> RemoteStats:
        """The counters now."""
        with self._lock:
            read, written = self._bytes
            return RemoteStats(
                dict(self._results),
                read,
                written,
                self.breaker.state,
                self._refuted,
                dict(self._dropped),
            )

    def close(self) -> None:
        """Release the store's connections. Closing twice does nothing."""
        with self._opening:
            self._closed = True
            store, self._store = self._store, None
        if store is not None:
            store.close()

    def _ask(
        self, names: Sequence[bytes], deadline: int
    ) -> dict[bytes, Literal["ok", "missing", "refuted", "late"]]:
        """The store's answer about each name."""
        if not names:
            return {}
        found = self._call("exists", len(names), lambda store: store.exists_many(names, deadline))
        self._count("exists", found)
        answers: dict[bytes, Literal["ok", "missing", "refuted", "late"]] = {}
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

    def _put(
        self,
        store: RemoteStore,
        names: Sequence[bytes],
        blocks: Sequence[tuple[bytes, int, tuple[int, int], torch.Tensor, bytes]],
        until: int,
    ) -> list[Result]:
        """Make headers, and write the blocks that have one."""
        found = [Result("refused", "only whole blocks are stored")] * len(blocks)
        whole = (0, self.block_format.layers)
        rows = [
            (at, key, label, memory.numpy())
            for at, (key, _, layers, memory, label) in enumerate(blocks)
            if tuple(layers) == whole
        ]
        headers = self.form.headers([(key, label, memory) for _, key, label, memory in rows])
        puts: list[tuple[int, Put]] = []
        for (at, _, _, memory), (header, why) in zip(rows, headers, strict=True):
            if why is None:
                puts.append((at, Put(names[at], header, memory)))
            else:
                found[at] = Result("refused", why)
        if puts:
            results = store.put_many([put for _, put in puts], until)
            for (at, _), result in zip(puts, results, strict=True):
                found[at] = result
        return found

    def _call(
        self, what: str, count: int, call: Callable[[RemoteStore], list[Result]]
    ) -> list[Result]:
        """Call the store unless the breaker is open; whatever it raises is `unreachable`."""
        if not count:
            return []
        if self._closed or not self.breaker.allows():
            why = "closed" if self._closed else "the circuit breaker is open"
            return [Result("unreachable", why)] * count
        ok = False
        try:
            found = call(self._open())
            ok = any(one.outcome not in {"late", "unreachable"} for one in found)
        except Exception as error:  # noqa: BLE001 - a back end's library may raise anything
            found = [Result("unreachable", f"{type(error).__name__}: {error}")] * count
        finally:
            if self.breaker.note(ok=ok):
                state = self.breaker.state
                _LOG.warning("%s: the circuit breaker is %s after a %s", self.url, state, what)
        return found

    def _open(self) -> RemoteStore:
        """The store; opened by the first call that reaches it."""
        store = self._store
        if store is None:
            with self._opening:
                if self._closed:
                    raise TransferError(f"{self.url} is closed")
                store = self._store
                if store is None:
                    store = self._store = open_store(self.url, self.form)
        return store

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
            with self._lock:
                self._refuted += 1

    def _count(self, what: str, found: Sequence[Result]) -> None:
        with self._lock:
            self._results.update((what, one.outcome) for one in found)

    def _count_bytes(self, way: int, count: int) -> None:
        with self._lock:
            self._bytes[way] += count


def value_format(
    model: ModelShape, form: BlockFormat, secret: bytes | None, *, rank: int = 0, ranks: int = 1
) -> ValueFormat:
    """Names and checksums of one rank's blocks.

    Latent KV is equal on all ranks, so its blocks have the names of rank 0 of 1.

    Raises:
        ConfigError: a layout with K and V apart, a rank that is not there, an empty secret.
    """
    if not 0 <= rank < ranks:
        raise ConfigError(f"rank is {rank}, 0 to {ranks - 1} wanted, for {ranks} ranks")
    planes = form.planes()
    if len(planes) != 1:
        raise ConfigError("a store keeps K and V of a layer together: use Layout(kv='joined')")
    if model.latent:
        rank, ranks = 0, 1
    about = asdict(form) | {"layout": form.layout.digest().hex(), "rank": rank, "ranks": ranks}
    return ValueFormat(
        layers=form.layers,
        layer_bytes=planes[0],
        block_tokens=form.block_tokens,
        meaning=hashlib.blake2b(
            json.dumps(about, sort_keys=True).encode(), digest_size=32
        ).digest(),
        secret=secret,
    )


def _leading(flags: Iterable[bool]) -> int:
    """Number of leading flags that are set."""
    count = 0
    for flag in flags:
        if not flag:
            break
        count += 1
    return count


def _reasons(found: Sequence[Result]) -> list[str | None]:
    return [None if one.outcome == "ok" else f"{one.outcome}: {one.reason}" for one in found]
