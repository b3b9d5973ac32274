"""Counters of a remote storage.

Invariant: each block of each call is counted once, by operation and outcome.
Cost: a lock per call.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvtrie.breaker import Breaker
    from kvtrie.tiers.remote.protocol import Outcome, Result

__all__ = ["Counts", "Operation", "RemoteStats"]

BreakerState: TypeAlias = Literal["closed", "open", "probing"]
Operation: TypeAlias = Literal["get", "put", "exists", "remove"]


@dataclass(frozen=True, slots=True)
class RemoteStats:
    """Counters of a remote storage since it was opened.

    Attributes:
        results: blocks by operation ("get", "put", "exists") and outcome.
        bytes_read: bytes of verified layers.
        bytes_written: bytes of values present in the store after a put.
        breaker: state of the circuit breaker of all calls.
        writes: state of the circuit breaker of puts.
        refuted: wrong beliefs.
        dropped: blocks evicted before they were stored, by the outcome of the latest failed put, or
            `late` without a failed put.
    """

    results: dict[tuple[str, Outcome], int]
    bytes_read: int
    bytes_written: int
    breaker: BreakerState
    writes: BreakerState
    refuted: int
    dropped: dict[Outcome, int]

    @classmethod
    def together(cls, parts: Sequence[RemoteStats]) -> RemoteStats:
        """Return the sums of counters, with the first breaker state other than closed.

        Args:
            parts: the counters of each layer group, at least of a single group.
        """
        if len(parts) == 1:
            return parts[0]
        results: Counter[tuple[str, Outcome]] = Counter()
        dropped: Counter[Outcome] = Counter()
        for part in parts:
            results.update(part.results)
            dropped.update(part.dropped)
        return cls(
            dict(results),
            sum(part.bytes_read for part in parts),
            sum(part.bytes_written for part in parts),
            _first_not_closed(part.breaker for part in parts),
            _first_not_closed(part.writes for part in parts),
            sum(part.refuted for part in parts),
            dict(dropped),
        )


class Counts:
    """Counters of a remote storage, for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._results: Counter[tuple[str, Outcome]] = Counter()
        self._read = self._written = self._refuted = 0
        self._dropped: Counter[Outcome] = Counter()
        self._not_written: Outcome = "late"

    def results(self, operation: Operation, found: Sequence[Result]) -> None:
        """Count the results of a call."""
        with self._lock:
            self._results.update((operation, one.outcome) for one in found)
            if operation == "put":
                failed = [one for one in found if one.outcome != "ok"]
                self._not_written = failed[-1].outcome if failed else "late"

    def transferred(self, *, read: int = 0, written: int = 0) -> None:
        """Count transferred bytes."""
        with self._lock:
            self._read += read
            self._written += written

    def refuted(self) -> None:
        """Count a wrong belief."""
        with self._lock:
            self._refuted += 1

    def dropped(self, blocks: int) -> None:
        """Count blocks evicted before they were stored."""
        with self._lock:
            self._dropped[self._not_written] += blocks

    def stats(self, breaker: Breaker, writes: Breaker) -> RemoteStats:
        """Return the current counters."""
        states = breaker.state, writes.state
        with self._lock:
            results, dropped = dict(self._results), dict(self._dropped)
            return RemoteStats(results, self._read, self._written, *states, self._refuted, dropped)


def _first_not_closed(states: Iterable[BreakerState]) -> BreakerState:
    for state in states:
        if state != "closed":
            return state
    return "closed"
