"""Beliefs: this process's knowledge of a store that other processes change without notice.

A belief is *confirmed* by an own put or get, *reported* by `exists`, or *refuted* by a get or an
`exists` without the value. A refuted name is not queried again for a backoff that doubles from 1 s
to 5 min.
Invariant: the table is bounded. A forgotten name is unknown and costs a query.
Cost: a dictionary lookup.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Beliefs", "Kind"]

Kind: TypeAlias = Literal["confirmed", "reported", "refuted", "unknown"]

_NS = 1_000_000_000
_MOST = 1 << 18
_FIRST_NS = _NS
_MOST_NS = 300 * _NS


class _Belief(NamedTuple):
    kind: Kind
    at_ns: int
    backoff_ns: int = 0


class Beliefs:
    """A bounded table of beliefs by name.

    Args:
        trust_s: seconds during which a confirmed or reported belief is used without a query.
        clock: nanoseconds, monotone.
        most: maximum number of names.
    """

    def __init__(self, trust_s: float, clock: Callable[[], int], most: int = _MOST) -> None:
        self._trust_ns = int(trust_s * _NS)
        self._clock = clock
        self._most = most
        self._lock = threading.Lock()
        self._table: OrderedDict[bytes, _Belief] = OrderedDict()

    def __len__(self) -> int:
        return len(self._table)

    def kind(self, name: bytes) -> Kind:
        """Return the current belief, or "unknown" if the store must be queried."""
        with self._lock:
            belief = self._table.get(name)
            if belief is None:
                return "unknown"
            age = self._clock() - belief.at_ns
            limit = belief.backoff_ns if belief.kind == "refuted" else self._trust_ns
            return belief.kind if age < limit else "unknown"

    def seen(self, name: bytes) -> bool:
        """Return whether this process has found or written the value, never refuted since."""
        with self._lock:
            belief = self._table.get(name)
            return belief is not None and belief.kind != "refuted"

    def confirm(self, name: bytes) -> None:
        """Record a successful put or get."""
        self._put(name, _Belief("confirmed", self._clock()))

    def report(self, name: bytes) -> None:
        """Record a value found by `exists`, keeping the backoff of a refuted name."""
        with self._lock:
            before = self._table.get(name)
        backoff = 0 if before is None else before.backoff_ns
        self._put(name, _Belief("reported", self._clock(), backoff))

    def refute(self, name: bytes) -> bool:
        """Record a missing value and return whether it was believed to be present."""
        with self._lock:
            before = self._table.get(name)
        backoff = _FIRST_NS
        if before is not None and before.backoff_ns:
            backoff = min(2 * before.backoff_ns, _MOST_NS)
        self._put(name, _Belief("refuted", self._clock(), backoff))
        return before is not None and before.kind in {"confirmed", "reported"}

    def forget(self, name: bytes) -> None:
        """Remove a name after a call without an answer."""
        with self._lock:
            self._table.pop(name, None)

    def clear(self) -> None:
        """Remove all names."""
        with self._lock:
            self._table.clear()

    def _put(self, name: bytes, belief: _Belief) -> None:
        with self._lock:
            self._table.pop(name, None)
            self._table[name] = belief
            if len(self._table) > self._most:
                self._table.popitem(last=False)
