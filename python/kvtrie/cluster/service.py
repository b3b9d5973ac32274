"""Service: calls of a service under a circuit breaker, counted by outcome.

Invariant: each call is counted once, and no call is made while the breaker is open. A failure is
logged once per reason and day. Cost: a lock per call.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from kvtrie.breaker import Breaker, State
from kvtrie.cluster.http_client import CallError, HttpClient
from kvtrie.errors import ConfigError
from kvtrie.failure_log import FailureLog

if TYPE_CHECKING:
    from collections.abc import Callable


__all__ = ["SETUP_S", "Service", "ServiceStats", "seconds_from_now"]

SETUP_S = 5.0
"""Deadline in seconds of the first call, and of calls that register a machine."""

_LOG = logging.getLogger(__name__)
_NS = 1_000_000_000
_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class ServiceStats:
    """Counters of a service's client since it was made.

    Attributes:
        calls: calls by outcome: "ok", "late" (no whole answer by the deadline), "unreachable",
            "invalid" (no HTTP, no JSON, more than 4 MiB, or an unexpected structure), "refused" (a
            status without success) and "open" (not made: the circuit breaker was open).
        breaker: state of the circuit breaker of all calls.
    """

    calls: dict[str, int]
    breaker: State


class Service:
    """A service with JSON answers over HTTP.

    Args:
        url: its URL.
        clock: nanoseconds of the circuit breaker, monotone.

    Attributes:
        url: the URL.
        breaker: the circuit breaker.

    Raises:
        ConfigError: an invalid URL.
    """

    def __init__(self, url: str, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._http = HttpClient(url)
        self.url = self._http.url
        self.breaker = Breaker(clock)
        self._failures = FailureLog(_LOG, clock)
        self._lock = threading.Lock()
        self._outcomes: Counter[str] = Counter()

    @property
    def breaks(self) -> int:
        """Number of failed or broken connections: the service may have restarted since."""
        return self._http.breaks

    def stats(self) -> ServiceStats:
        """Return the counters now."""
        with self._lock:
            return ServiceStats(dict(self._outcomes), self.breaker.state)

    def check(self, what: str, ask: Callable[[int], object]) -> None:
        """Make the first call. If the service does not answer, later calls ask again.

        Args:
            what: the expected service, for the message.
            ask: makes the call, until a deadline.

        Raises:
            ConfigError: the answer is from a different service.
        """
        try:
            ask(seconds_from_now(SETUP_S))
        except CallError as error:
            if error.outcome in {"refused", "invalid"}:
                self.close()
                raise ConfigError(f"{self.url} is not {what}: {error.reason}") from error
            self.warn(error)
        else:
            with self._lock:
                self._outcomes.clear()  # a refusal may be the expected answer

    def ask(
        self,
        method: str,
        path: str,
        body: object,
        until: int,
        read: Callable[[Any], _Answer],
    ) -> _Answer:
        """Make a call, and read its answer.

        Args:
            method: as "POST".
            path: the path below the URL's path.
            body: the value to send as JSON. None sends no body.
            until: the deadline, in nanoseconds of `time.monotonic_ns`.
            read: reads the JSON value of the answer. Raises `ValueError` for an unexpected value.

        Raises:
            CallError: no usable answer.
        """
        if not self.breaker.allows():
            self._count("open")
            raise CallError("open", "the circuit breaker is open")
        ok = False
        try:
            answer = read(self._http.call(method, path, body, until))
            ok = True
        except CallError as error:
            ok = error.outcome == "refused"  # an answer from a working service
            self._count(error.outcome)
            raise
        except ValueError as error:
            self._count("invalid")
            raise CallError("invalid", f"{method} {path}: {error}") from error
        finally:
            if self.breaker.note(ok=ok):
                _LOG.warning("%s: the circuit breaker is %s", self.url, self.breaker.state)
        self._count("ok")
        return answer

    def warn(self, error: CallError) -> None:
        """Log a failed call, unless the same failure was logged within the last day."""
        if error.outcome != "open":
            self._failures.warn(self.url, str(error))

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _count(self, outcome: str) -> None:
        with self._lock:
            self._outcomes[outcome] += 1


def seconds_from_now(seconds: float) -> int:
    """Return a deadline in nanoseconds of `time.monotonic_ns`."""
    return time.monotonic_ns() + int(seconds * _NS)
