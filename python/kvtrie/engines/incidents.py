"""Incidents: requests that were served without the cache because of their content or an error.

Invariant: logging is bounded; a line that follows dropped ones gives their number. Cost: none
without an incident.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable, Iterator

__all__ = ["Incidents"]

_MINUTE_NS = 60_000_000_000
_MOST_LINES = 5


class Incidents:
    """Logs incidents, at most five of each kind per minute.

    Args:
        log: the log.
        clock: nanoseconds, monotone.

    Attributes:
        failures: unexpected exceptions that were contained.
    """

    def __init__(self, log: logging.Logger, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._log, self._clock = log, clock
        self._lines: dict[str, tuple[int, int]] = {}  # begin of the minute, lines in it
        self.failures = 0

    def ignored(self, request: object, why: str) -> None:
        """Log that a field of a request was ignored."""
        if (more := self._more("ignored")) is not None:
            self._log.warning("kvtrie: request %.64r: ignored: %.300s%s", request, why, more)

    @contextmanager
    def contained(
        self, request: object, give_up: Callable[[], None] | None = None
    ) -> Iterator[None]:
        """Contain any exception of the block: the request is not cached.

        Args:
            request: its name.
            give_up: restores the books after an exception.
        """
        try:
            yield
        except Exception:  # noqa: BLE001 - one request must not end the engine for all others
            self.failures += 1
            if (more := self._more("failed")) is not None:
                self._log.exception("kvtrie: request %.64r is not cached%s", request, more)
            if give_up is not None:
                give_up()

    def _more(self, kind: str) -> str | None:
        """The end of a line about dropped ones; None if this line is dropped, too."""
        now = self._clock()
        begun, lines = self._lines.get(kind, (now, 0))
        more = ""
        if now - begun >= _MINUTE_NS:
            if lines > _MOST_LINES:
                more = f" ({lines - _MOST_LINES} more were not logged)"
            begun, lines = now, 0
        self._lines[kind] = begun, lines + 1
        return more if lines < _MOST_LINES else None
