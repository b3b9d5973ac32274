"""Pauses: measures how long sessions wait for tools, from an answer to the tool results.

Invariant: a pause is measured once. Cost: a few numbers for each of the last 4096 sessions.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

__all__ = ["Pauses"]

_MOST_SESSIONS = 4096
_FIRST_S = 10.0  # expected before the first measured pause
_WEIGHT = 1 / 8  # of a new pause in a mean


@dataclass(slots=True)
class _Session:
    mean: float | None = None  # seconds
    begun: float | None = None


class Pauses:
    """Pauses of sessions. All times are in seconds of the same clock."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[tuple[str, str], _Session] = OrderedDict()
        self._mean: float | None = None

    def begin(self, session: tuple[str, str], now: float) -> float:
        """Begin a pause of a session. Return its expected length.

        This is the mean of the session's own pauses, else of all pauses, weighted to newer pauses.

        Args:
            session: its name, and the salt of its requests.
            now: the time.
        """
        one = self._sessions.setdefault(session, _Session())
        self._sessions.move_to_end(session)
        if len(self._sessions) > _MOST_SESSIONS:
            self._sessions.popitem(last=False)
        one.begun = now
        expected = self._mean if one.mean is None else one.mean
        return _FIRST_S if expected is None else expected

    def end(self, session: tuple[str, str], now: float) -> None:
        """End a pause: the session continues with its tool results."""
        one = self._sessions.get(session)
        if one is None or one.begun is None:
            return
        lasted, one.begun = max(0.0, now - one.begun), None
        one.mean = _mean(one.mean, lasted)
        self._mean = _mean(self._mean, lasted)


def _mean(before: float | None, lasted: float) -> float:
    return lasted if before is None else before + _WEIGHT * (lasted - before)
