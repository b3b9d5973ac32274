"""GuardedStore: a store that is opened by the first call that reaches it, under a circuit breaker.

Invariant: a call returns a result per block, whatever the back end raises; while the breaker is
open no call reaches the store. Cost: a lock per call.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from kvtrie.errors import ConfigError, TransferError
from kvtrie.printable import MESSAGE, printable
from kvtrie.tiers.remote.breaker import Breaker
from kvtrie.tiers.remote.open import open_store
from kvtrie.tiers.remote.protocol import Result

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtrie._kvtrie import ValueFormat
    from kvtrie.tiers.remote.counts import Operation
    from kvtrie.tiers.remote.protocol import RemoteStore
    from kvtrie.tiers.remote.url import RemoteUrl

__all__ = ["GuardedStore"]

_LOG = logging.getLogger(__name__)


class GuardedStore:
    """A store and its circuit breaker.

    Args:
        url: where the store is; with `strict=1` it has to be reachable now.
        form: the format of the values.
        clock: nanoseconds, monotone.
        store: the store, if it is open already.

    Raises:
        ConfigError: a bad URL; a store that is unreachable, with `strict=1` in the URL.
    """

    def __init__(
        self,
        url: RemoteUrl,
        form: ValueFormat,
        clock: Callable[[], int],
        store: RemoteStore | None = None,
    ) -> None:
        self._url, self._form = url, form
        self.breaker = Breaker(clock)
        self._opening = threading.Lock()
        self._closed = False
        self._store = store
        strict = url.strict
        if store is None:
            try:
                self._open()
            except TransferError as error:
                if strict:
                    raise ConfigError(f"{url} is unreachable: {error}") from error
                _LOG.warning(
                    "%s is unreachable, a probe follows: %s", url, printable(error, MESSAGE)
                )
                self.breaker.open()

    def call(
        self, operation: Operation, count: int, call: Callable[[RemoteStore], list[Result]]
    ) -> list[Result]:
        """Call the store unless the breaker is open; an exception is `unreachable`.

        Args:
            operation: the operation, for the log.
            count: number of blocks.
            call: makes the call and returns a result per block.
        """
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
                now = self.breaker.state
                _LOG.warning("%s: the circuit breaker is %s after a %s", self._url, now, operation)
        return found

    def close(self) -> None:
        """Release the store's connections. Closing twice does nothing."""
        with self._opening:
            self._closed = True
            store, self._store = self._store, None
        if store is not None:
            store.close()

    def _open(self) -> RemoteStore:
        """The store; opened by the first call that reaches it."""
        store = self._store
        if store is None:
            with self._opening:
                if self._closed:
                    raise TransferError(f"{self._url} is closed")
                store = self._store
                if store is None:
                    store = self._store = open_store(self._url, self._form)
        return store
