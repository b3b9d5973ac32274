"""Breaker: a circuit breaker that limits calls to a failing service to occasional probes.

    CLOSED ──3 failures in a row──> OPEN ──after 1 s, 2 s, … 60 s──> PROBING ──ok──> CLOSED
                                     ^                                  │
                                     └───────────── failure ────────────┘

Invariant: while open it allows no call, and while probing a single call. Cost: a comparison.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Breaker", "State"]

State: TypeAlias = Literal["closed", "open", "probing"]

_NS = 1_000_000_000
_FAILURES = 3
_FIRST_NS = _NS
_MOST_NS = 60 * _NS


class Breaker:
    """A circuit breaker.

    Args:
        clock: nanoseconds, monotone.
        failures: number of failures in a row that open it.
    """

    def __init__(self, clock: Callable[[], int], failures: int = _FAILURES) -> None:
        self._clock = clock
        self._most = failures
        self._lock = threading.Lock()
        self._failures = 0
        self._interval = _FIRST_NS
        self._next: int | None = None  # time of the next probe; None while closed
        self._probing = False

    @property
    def state(self) -> State:
        """The state now."""
        with self._lock:
            if self._next is None:
                return "closed"
            return "probing" if self._probing else "open"

    @property
    def due(self) -> bool:
        """Whether `allows` would allow a call."""
        with self._lock:
            return self._next is None or not (self._probing or self._clock() < self._next)

    def allows(self) -> bool:
        """Return whether a call may be made. If so, `note` has to follow."""
        with self._lock:
            if self._next is None:
                return True
            if self._probing or self._clock() < self._next:
                return False
            self._probing = True
            return True

    def note(self, *, ok: bool) -> bool:
        """Record the end of a call. Return whether it opened or closed the breaker."""
        with self._lock:
            was_open = self._next is not None
            if ok:
                self._failures, self._interval, self._next = 0, _FIRST_NS, None
                self._probing = False
                return was_open
            self._failures += 1
            # A call begun before the breaker opened has no new information.
            if was_open and not self._probing:
                return False
            if was_open:
                self._interval = min(2 * self._interval, _MOST_NS)
            elif self._failures < self._most:
                return False
            self._next = self._clock() + self._interval
            self._probing = False
            return not was_open

    def skip(self) -> None:
        """Record that an allowed call was not made."""
        with self._lock:
            self._probing = False

    def open(self) -> None:
        """Open the breaker at once, for a service that did not answer at the start."""
        with self._lock:
            self._failures = self._most
            self._next = self._clock() + self._interval
