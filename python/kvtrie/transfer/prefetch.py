"""Prefetch from a shared store: ask for the blocks after the local match, and bring them to host.

Invariant: it returns by its deadline whatever the store does, and only marks blocks that the store
reported or that this process wrote or read; a block that then cannot be read is a failed load.
Cost: one hash per block of the prompt, and a question about those that no local tier has.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import numpy as np

from kvtrie.errors import ConfigError, NoSpaceError
from kvtrie.settings.argument import real
from kvtrie.settings.hint import Prefetch
from kvtrie.transfer.deadline_call import DeadlineCall

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from typing_extensions import Buffer

    from kvtrie import BlockManager, Scope
    from kvtrie.tiers.remote import Found
    from kvtrie.transfer.ledger import Ledger

__all__ = ["Prefetched", "Prefetcher"]

_NS = 1_000_000_000
_MOST_ASKING = 4  # questions of which none has returned, each on its own thread
_MOST_S = 86_400.0


@runtime_checkable
class _Finds(Protocol):
    def find(self, keys: NDArray[np.uint8], deadline: int) -> Found: ...


class Prefetched(NamedTuple):
    """Result of a prefetch, in blocks.

    Attributes:
        asked: names that the store was asked for.
        found: blocks after the local match that the store has; they are marked, and on their way
            to host as far as there was time.
        refuted: blocks that were believed to be in the store and are not.
        late: names without an answer by the deadline.
    """

    asked: int
    found: int
    refuted: int
    late: int


class Prefetcher:
    """The questions of one executor.

    Args:
        manager: its manager, whose last tier is a shared store or not.
        ledger: the moves and storages of its runner.
    """

    def __init__(self, manager: BlockManager, ledger: Ledger) -> None:
        kinds = [tier.kind for tier in manager.tiers]
        self._manager, self._ledger, self._clock = manager, ledger, ledger.clock
        self._tier = kinds.index("remote") if "remote" in kinds else None
        self._asking: list[DeadlineCall] = []

    def prefetch(
        self,
        tokens: Sequence[int] | NDArray[np.integer] | Buffer,
        scope: Scope | None,
        deadline_s: float,
    ) -> Prefetched:
        """As `Executor.prefetch`."""
        with self._ledger.section:  # refuses a fork
            seconds = real("deadline_s", deadline_s, 0, _MOST_S)
        if not seconds:
            raise ConfigError("deadline_s is 0, above 0 wanted")
        deadline = self._clock() + int(seconds * _NS)
        storage = None if self._tier is None else self._ledger.pools[self._tier]
        if self._tier is None or not isinstance(storage, _Finds):
            return Prefetched(0, 0, 0, 0)
        manager = self._manager
        keys = manager.keys(tokens, scope=scope)
        path = np.asarray(tokens, dtype=np.uint32)[: len(keys) * manager.block_tokens]
        local = self._local(path, scope)
        if local == len(keys):
            return Prefetched(0, 0, 0, 0)
        found = self._ask(storage, keys[local:], deadline)
        if found is None:
            return Prefetched(len(keys) - local, 0, 0, len(keys) - local)
        upto = (local + found.blocks) * manager.block_tokens
        if found.refuted:
            # A block to clear may be leased or on the move: then it stays, and its load fails.
            with suppress(ConfigError):
                manager.mark(
                    path, self._tier, present=False, now=self._clock(), scope=scope,
                    skip=local + found.blocks,
                )  # fmt: skip
        if found.blocks and self._mark(path[:upto], scope, local):
            self._bring(path[:upto], scope, deadline)
        return Prefetched(found.queried, found.blocks, found.refuted, found.late)

    def _local(self, path: NDArray[np.uint32], scope: Scope | None) -> int:
        """Leading blocks of which a faster tier than the store has all layers."""
        match = self._manager.lookup(path, now=self._clock(), scope=scope, keep=0)
        count, most = 0, len(match.handles)
        while count < most:
            step = max(match.resident(tier, skip=count) for tier in range(self._tier or 0))
            if not step:
                break
            count += step
        return count

    def _ask(self, storage: _Finds, keys: NDArray[np.uint8], deadline: int) -> Found | None:
        """The store's answer; None if none came in time."""
        self._asking = [call for call in self._asking if call.running]
        if len(self._asking) >= _MOST_ASKING:
            return None
        answers: list[Found] = []
        left = deadline - self._clock()
        until = time.monotonic_ns() + left
        call = DeadlineCall(lambda: answers.append(storage.find(keys, until)), self._clock)
        if not call.wait(left):
            self._asking.append(call)
            return None
        return answers[0]

    def _mark(self, path: NDArray[np.uint32], scope: Scope | None, local: int) -> bool:
        """Mark blocks as resident in the store; whether that was possible."""
        try:
            self._manager.mark(
                path, self._tier or 0, present=True, now=self._clock(), scope=scope, skip=local
            )
        except (ConfigError, NoSpaceError):
            # A local block left since the match, or leases fill the tier: the request computes.
            return False
        return True

    def _bring(self, path: NDArray[np.uint32], scope: Scope | None, deadline: int) -> None:
        """Hint until all blocks are on their way to host, or the deadline.

        Only a quarter of host memory may be in flight, so the rest is asked for again while the
        prefix grows. Blocks that have come are pinned until then, or later ones would evict them.
        """
        hint = Prefetch(tokens=path, tier="host", deadline=deadline, scope=scope)
        ledger, most, pins = self._ledger, -1, _Pins(self._manager)
        try:
            while True:
                with ledger.section:
                    if (now := self._clock()) >= deadline:
                        return
                    ledger.poll()
                    if (local := self._local(path, scope)) > most:
                        most = local
                        pins.pin(path, scope, now)
                        (reply,) = self._manager.hint([hint], now=now)
                        ledger.poll()
                        if reply.code != "crowded" or ledger.on_call:
                            return
                    if not ledger.pending:
                        return
                    ticket = ledger.section.ticket((deadline - now) / _NS)
                ticket.wait()
        finally:
            pins.end(self._clock())


class _Pins:
    """Pins of the leading blocks of a prompt in host memory, at most three quarters of it."""

    def __init__(self, manager: BlockManager) -> None:
        (host,) = (tier for tier in manager.tiers if tier.kind == "host")
        self._manager = manager
        self._left = 3 * host.room(manager.model, manager.block_tokens) // 4
        self._count = 0
        self._pins: list[int] = []

    def pin(self, path: NDArray[np.uint32], scope: Scope | None, now: int) -> None:
        """Pin the blocks that have come since the last call."""
        match = self._manager.lookup(path, now=now, scope=scope, keep=0)
        if len(match.handles) < self._count:
            return
        new = min(self._left, match.resident("host", skip=self._count))
        if new:
            handles = match.handles[self._count : self._count + new]
            self._pins.append(self._manager.pin_copies(handles, "host", now=now))
            self._count, self._left = self._count + new, self._left - new

    def end(self, now: int) -> None:
        """Unpin all blocks."""
        for pin in self._pins:
            self._manager.unpin_copies(pin, now=now)
