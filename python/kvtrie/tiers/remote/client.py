"""RemoteClient: accesses blocks by their content keys in the store of any back end.

It names blocks, computes and verifies checksums, keeps beliefs, and stops calling a failing store.
Invariant: a block is returned only under its own name, with every requested layer verified.
Anything else is a miss with a counted reason. No call waits beyond its deadline if the back end
honours deadlines.
Cost: a hash of all bytes per read and per write, without the interpreter lock.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Literal

import numpy as np

from kvtrie.tiers.remote.beliefs import Beliefs
from kvtrie.tiers.remote.counts import Counts
from kvtrie.tiers.remote.guarded import GuardedStore
from kvtrie.tiers.remote.protocol import Result
from kvtrie.tiers.remote.search import known_blocks, least, search
from kvtrie.tiers.remote.values import get_values, put_values

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from kvtrie._kvtrie import ValueFormat
    from kvtrie.tiers.remote.counts import RemoteStats
    from kvtrie.tiers.remote.protocol import RemoteStore
    from kvtrie.tiers.remote.search import Answer, Found
    from kvtrie.tiers.remote.url import RemoteUrl
    from kvtrie.tiers.remote.values import ReadBlock, WrittenBlock

__all__ = ["TRUST_S", "RemoteClient"]

TRUST_S = 60.0
"""Default seconds of trust in a belief."""

_LOG = logging.getLogger(__name__)
_NS = 1_000_000_000
_PATIENCE_NS = 30 * _NS  # limit of a call without a deadline


class RemoteClient:
    """The blocks of a format in a shared store.

    Args:
        url: the URL of the store.
        form: names and checksums of the blocks.
        layers: layers of a block.
        trust_s: seconds during which a belief is used without a query. None means 60.
        lookup: "all" queries the store, "local" uses only blocks written or read by this process.
            None means "all".
        store: the store, if already open.
        clock: nanoseconds, as `time.monotonic_ns`.

    Attributes:
        form: names and checksums.
        url: the URL of the store.
        breaker: the circuit breaker of all calls.

    Raises:
        ConfigError: the URL is invalid, or, with `strict=1` in the URL, the store is unreachable.
    """

    def __init__(
        self,
        url: RemoteUrl,
        form: ValueFormat,
        layers: int,
        *,
        trust_s: float | None = None,
        lookup: Literal["all", "local"] | None = None,
        store: RemoteStore | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.url, self.form = url, form
        self._layers = layers
        self._beliefs = Beliefs(TRUST_S if trust_s is None else trust_s, clock)
        self._local = lookup == "local"
        self._clock = clock
        self._counts = Counts()
        self._store = GuardedStore(url, form, clock, store)
        self.breaker = self._store.breaker

    @property
    def logs_failures(self) -> bool:
        """True: the client logs failed calls of the store, once per reason."""
        return True

    def read_many(
        self, blocks: Sequence[ReadBlock], *, deadline: int | None = None
    ) -> list[str | None]:
        """Read blocks into memory and verify them, within a common deadline.

        Args:
            blocks: keys, slots (unused), layers, and host memory.
            deadline: nanoseconds of the clock, by default 30 s from now.

        Returns:
            The reason of each block's failure, or None.
        """
        names = self._names([key for key, *_ in blocks])
        until = self._until(deadline)

        def get(store: RemoteStore) -> list[Result]:
            return get_values(store, self.form, names, blocks, deadline=until)

        found = self._store.call("get", len(blocks), get)
        damaged = [name for name, one in zip(names, found, strict=True) if one.outcome == "damaged"]
        if damaged:
            # A put writes only absent values, so a damaged value would never be replaced.
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
        """Write blocks missing in the store, within a common deadline.

        Args:
            blocks: keys, slots (unused), layers, host memory, labels.
            deadline: nanoseconds of the clock, by default 30 s from now.

        Returns:
            The reason of each block's failure, or None.
        """
        # Incomplete blocks are no fault of the store, so no breaker counts them.
        whole = [at for at, block in enumerate(blocks) if tuple(block[2]) == (0, self._layers)]
        given = [blocks[at] for at in whole]
        names = self._names([key for key, *_ in given])
        until = self._until(deadline)

        def put(store: RemoteStore) -> list[Result]:
            return put_values(store, self.form, names, given, deadline=until)

        found = [Result("refused", "only whole blocks are stored")] * len(blocks)
        stored = self._store.call("put", len(given), put)
        for at, name, block, result in zip(whole, names, given, stored, strict=True):
            found[at] = result
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
        """Query the store for the blocks of a sequence, until a block is missing.

        Args:
            keys: content keys `(blocks, 32)`, as in `BlockManager.keys`.
            deadline: nanoseconds of the clock.
            forms: formats of all ranks if each rank's part of a block is required. None means this
                rank's format.
        """
        names = [self._names(keys, form) for form in forms or [self.form]]
        rows = list(zip(*names, strict=True))
        if self._local:
            return known_blocks(rows, self._beliefs)
        return search(rows, self._beliefs, lambda unknown: self._ask(unknown, deadline))

    def holds(self, keys: NDArray[np.uint8], deadline: int) -> list[bool]:
        """Return which blocks the store has, each queried independently.

        Args:
            keys: content keys `(blocks, 32)`.
            deadline: nanoseconds of the clock.
        """
        return [answer == "ok" for answer in self.answers(keys, deadline)]

    def answers(
        self,
        keys: NDArray[np.uint8],
        deadline: int,
        forms: Sequence[ValueFormat] | None = None,
    ) -> list[Answer]:
        """Return the store's answer, or the belief, for each block independently.

        Args:
            keys: content keys `(blocks, 32)`.
            deadline: nanoseconds of the clock.
            forms: formats of all ranks if each rank's part of a block is required. None means this
                rank's format.
        """
        rows = list(zip(*(self._names(keys, form) for form in forms or [self.form]), strict=True))
        names = {name: None for row in rows for name in row}
        if self._local:
            known: dict[bytes, Answer] = {
                name: "ok" if self._beliefs.seen(name) else "missing" for name in names
            }
        else:
            kinds = {name: self._beliefs.kind(name) for name in names}
            known = self._ask([name for name in names if kinds[name] == "unknown"], deadline)
            for name in names:
                known.setdefault(name, "refuted" if kinds[name] == "refuted" else "ok")
        return [least(known[name] for name in row) for row in rows]

    def refute(self, keys: Sequence[bytes], forms: Sequence[ValueFormat] | None = None) -> None:
        """Record blocks that another process of the server could not read.

        Args:
            keys: content keys.
            forms: formats of all ranks. None means this rank's format.
        """
        for form in forms or [self.form]:
            for name in self._names(keys, form):
                self._refute(name)

    def forget(self) -> None:
        """Drop all beliefs. The store keeps its blocks."""
        self._beliefs.clear()

    def count_dropped(self, blocks: int) -> None:
        """Count blocks evicted before they were stored."""
        self._counts.dropped(blocks)

    def stats(self) -> RemoteStats:
        """Return the current counters."""
        return self._counts.stats(self.breaker, self._store.writes)

    def close(self) -> None:
        """Release the store's connections. Closing twice does nothing."""
        self._store.close()

    def _ask(self, names: Sequence[bytes], deadline: int) -> dict[bytes, Answer]:
        """Return the store's answer for each name."""
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
