"""FailureLog: warnings about failed reads and writes, one per place and reason.

A device that is full fails each write for the same reason: one line reports that, counters report
how often. Invariant: two failures are of one reason if their texts differ only in numbers and keys;
such a pair is logged twice only a day apart. Cost: one search of the text per failure.
"""

from __future__ import annotations

import re
import threading
from typing import TYPE_CHECKING

from kvtrie.printable import MESSAGE, printable

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable

__all__ = ["FailureLog"]

_DAY_NS = 86_400_000_000_000
_MOST = 256  # reasons that are remembered
_VARIES = re.compile(r"(0x)?\b[0-9a-f]*\d[0-9a-f]*", re.IGNORECASE)


class FailureLog:
    """The failures that were logged within the last day.

    Args:
        log: the logger that gets the warnings.
        clock: nanoseconds; it may be a wall clock.
    """

    def __init__(self, log: logging.Logger, clock: Callable[[], int]) -> None:
        self._log, self._clock = log, clock
        self._lock = threading.Lock()
        self._logged: dict[tuple[str, str], int] = {}

    def warn(self, place: object, reason: str) -> None:
        """Log a failure, unless one of this place and reason was logged within the last day.

        Args:
            place: the path or the URL at which it happened.
            reason: text of the error; numbers and keys in it may vary from failure to failure.
        """
        kind = str(place), _VARIES.sub("#", reason)
        now = self._clock()
        with self._lock:
            last = self._logged.pop(kind, None)
            again = last is None or not 0 <= now - last < _DAY_NS
            self._logged[kind] = now if again or last is None else last
            if len(self._logged) > _MOST:
                del self._logged[next(iter(self._logged))]
        if again:
            why = printable(reason, MESSAGE)  # a text of a server, or of a file
            self._log.warning("%s: %s (failures of this kind are logged once a day)", place, why)
