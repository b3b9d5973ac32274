"""GuardedStore: a store with circuit breakers, opened by the first call that reaches it.

The breaker for all calls opens when the store does not answer. The breaker for puts opens when no
block is stored, for any reason, while lookups and gets continue.
Invariant: a call returns a result per block, whatever the back end raises. While a breaker is open,
no call of its kind reaches the store. A fault is logged once per reason and day, not per block.
Cost: a lock per call.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from kvtrie.breaker import Breaker
from kvtrie.errors import ConfigError, TransferError
from kvtrie.failure_log import FailureLog
from kvtrie.printable import MESSAGE, printable
from kvtrie.tiers.remote.open import open_store
from kvtrie.tiers.remote.protocol import Result

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtrie._kvtrie import ValueFormat
    from kvtrie.tiers.remote.counts import Operation
    from kvtrie.tiers.remote.protocol import RemoteStore
    from kvtrie.tiers.remote.url import RemoteUrl

__all__ = ["GuardedStore"]

_LOG = logging.getLogger(__name__)


class GuardedStore:
    """A store and its circuit breakers.

    Args:
        url: the URL of the store. With `strict=1` the store must be reachable now.
        form: the format of the values.
        clock: nanoseconds, monotone.
        store: the store, if already open.

    Attributes:
        breaker: the breaker of all calls.
        writes: the breaker of puts.

    Raises:
        ConfigError: the URL is invalid, or, with `strict=1` in the URL, the store is unreachable.
    """

    def __init__(
        self,
        url: RemoteUrl,
        form: ValueFormat,
        clock: Callable[[], int],
        store: RemoteStore | None = None,
    ) -> None:
        self._url, self._form = url, form
        self.breaker, self.writes = Breaker(clock), Breaker(clock)
        self._failures = FailureLog(_LOG, clock)
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
        """Call the store unless the breaker is open. An exception becomes `unreachable`.

        Args:
            operation: the operation, for the log.
            count: number of blocks.
            call: calls the store and returns a result per block.
        """
        if not count:
            return []
        why = self._refusal(operation)
        if why is not None:
            return [Result("unreachable", why)] * count
        found: list[Result] = []
        try:
            found = call(self._open())
        except Exception as error:  # noqa: BLE001 - a back end may raise anything
            found = [Result("unreachable", f"{type(error).__name__}: {error}")] * count
        finally:
            self._note(operation, found)
        return found

    def _refusal(self, operation: Operation) -> str | None:
        """Return the reason against a call now, or None."""
        if self._closed:
            return "closed"
        if not self.breaker.allows():
            return "the circuit breaker is open"
        if operation == "put" and not self.writes.allows():
            self.breaker.skip()
            return "the circuit breaker of writes is open"
        return None

    def _note(self, operation: Operation, found: Sequence[Result]) -> None:
        """Record the end of a call in the breakers and log a failure."""
        puts, outcomes = operation == "put", {one.outcome for one in found}
        for one in {one.outcome: one for one in found if _is_failure(operation, one)}.values():
            self._failures.warn(self._url, f"{operation}: {one.outcome}: {one.reason}")
        breakers = [("circuit breaker", self.breaker, outcomes - {"late", "unreachable"})]
        if puts:
            breakers.append(("circuit breaker of writes", self.writes, outcomes & {"ok"}))
        for name, breaker, ok in breakers:
            if breaker.note(ok=bool(ok)):
                state = breaker.state
                _LOG.warning("%s: the %s is %s after a %s", self._url, name, state, operation)

    def close(self) -> None:
        """Release the store's connections. Closing twice does nothing."""
        with self._opening:
            self._closed = True
            store, self._store = self._store, None
        if store is not None:
            store.close()

    def _open(self) -> RemoteStore:
        """Return the store, opening it if needed."""
        store = self._store
        if store is None:
            with self._opening:
                if self._closed:
                    raise TransferError(f"{self._url} is closed")
                store = self._store
                if store is None:
                    store = self._store = open_store(self._url, self._form)
        return store


def _is_failure(operation: Operation, result: Result) -> bool:
    """Return whether a result is a fault, unlike late lookups and missing blocks."""
    if operation == "put":
        return result.outcome != "ok"
    return result.outcome in {"unreachable", "refused", "full"}
