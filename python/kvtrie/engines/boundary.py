"""Boundary: keeps the content of a request from ending its engine.

Invariant: no exception leaves a `contained` block; logging is bounded, and a line that follows
dropped ones gives their number. Cost: about a microsecond per block until something fails.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvtrie.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from logging import Logger

__all__ = ["Boundary"]

_MINUTE_NS = 60_000_000_000
_MOST_LINES = 5


class Boundary:
    """Turns exceptions into requests that are not cached, and counts hints that are ignored.

    Logs at most five lines of each kind per minute.

    Args:
        name: the part of the engine, as the log names it.
        log: a logger whose lines the engine shows.
        clock: nanoseconds, monotone.

    Attributes:
        failures: exceptions that were contained.
        hints: hints that were ignored.
    """

    def __init__(
        self, name: str, log: Logger, clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._name, self._log, self._clock = name, log, clock
        self._lines: dict[str, tuple[int, int]] = {}  # begin of the minute, lines in it
        self.failures = 0
        self.hints = 0

    def ignored(self, request: object, why: str) -> None:
        """Count and log a hint of a request that is ignored."""
        self.hints += 1
        if (more := self._more("ignored")) is not None:
            self._log.warning(
                "%s: request %.64r: ignored: %.300s%s", self._name, request, _ascii(why), more
            )

    @contextmanager
    def contained(
        self, request: object = None, give_up: Callable[[], None] | None = None
    ) -> Generator[None]:
        """Contain any exception of the block: the request is not cached.

        The block returns its result; the code after it is the answer "not cached".

        Args:
            request: its name, where the engine gives one.
            give_up: restores the books after an exception; without it the block itself leaves them
                consistent wherever it fails.
        """
        try:
            yield
        except Exception as error:  # noqa: BLE001 - one request must not end the engine for others
            self.failures += 1
            if (more := self._more("failed")) is not None:
                self._log.warning(
                    "%s: %s is not cached: %.300s%s",
                    self._name,
                    "a request" if request is None else f"request {request!r:.64}",
                    _ascii(str(error)),
                    more,
                    # Content that kvtrie refuses by itself needs no traceback.
                    exc_info=None if isinstance(error, ConfigError) else error,
                )
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


def _ascii(text: str) -> str:
    return text.encode("ascii", "backslashreplace").decode()
