"""FailureLog: warnings about failed reads and writes, one per place and reason.

A full device fails each write for the same reason: a single line reports the reason, and counters
report the number of failures. Invariant: two failures have the same reason if their texts differ
only in numbers and keys, and the same reason at a place is logged at most once a day. Cost: a
search of the text per failure.
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
_MOST = 256  # remembered reasons
_VARIES = re.compile(r"(0x)?\b[0-9a-f]*\d[0-9a-f]*", re.IGNORECASE)


class FailureLog:
    """Failures logged within the last day.

    Args:
        log: the logger for the warnings.
        clock: nanoseconds, possibly of a wall clock.
    """

    def __init__(self, log: logging.Logger, clock: Callable[[], int]) -> None:
        self._log, self._clock = log, clock
        self._lock = threading.Lock()
        self._logged: dict[tuple[str, str], int] = {}

    def warn(self, place: object, reason: str) -> None:
        """Log a failure, unless its place and reason were logged within the last day.

        Args:
            place: the path or the URL of the failure.
            reason: text of the error. Its numbers and keys may vary from failure to failure.
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
            why = printable(reason, MESSAGE)  # the text may come from a server or a file
            self._log.warning("%s: %s (failures of this kind are logged once a day)", place, why)
