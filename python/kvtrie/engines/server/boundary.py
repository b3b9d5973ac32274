"""Boundary: keeps the content of a request from ending its engine.

Invariant: no exception leaves a `contained` block; logging is bounded, and a line that follows
dropped ones gives their number. Cost: a third of a microsecond per block until something fails.
"""

from __future__ import annotations

import time
import traceback
from typing import TYPE_CHECKING

from kvtrie.errors import ConfigError
from kvtrie.printable import printable

if TYPE_CHECKING:
    from collections.abc import Callable
    from logging import Logger

__all__ = ["Boundary", "Contained"]

_MINUTE_NS = 60_000_000_000
_MOST_LINES = 5
_LONGEST = 300  # characters of a reason


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
                "%s: request %s: ignored: %s%s", self._name, _named(request), _shown(why), more
            )

    def contained(
        self, request: object = None, give_up: Callable[[], None] | None = None
    ) -> Contained:
        """Contain any exception of the block: the request is not cached.

        The block returns its result; the code after it is the answer "not cached".

        Args:
            request: its name, where the engine gives one.
            give_up: restores the books after an exception; without it the block itself leaves them
                consistent wherever it fails.
        """
        return Contained(self, request, give_up)

    def failed(self, request: object, error: Exception) -> None:
        """Count and log an exception that was contained."""
        self.failures += 1
        if (more := self._more("failed")) is not None:
            self._log.warning(
                "%s: %s is not cached: %s%s%s",
                self._name,
                "a request" if request is None else f"request {_named(request)}",
                _shown(error),
                more,
                # Content that kvtrie refuses by itself needs no traceback.
                "" if isinstance(error, ConfigError) else _calls(error),
            )

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


class Contained:
    """A block whose exceptions a boundary contains; a generator would take six times as long.

    Args:
        boundary: what counts and logs the exception.
        request: as of `Boundary.contained`.
        give_up: as of `Boundary.contained`.
    """

    __slots__ = ("_boundary", "_give_up", "_request")

    def __init__(
        self, boundary: Boundary, request: object, give_up: Callable[[], None] | None
    ) -> None:
        self._boundary, self._request, self._give_up = boundary, request, give_up

    def __enter__(self) -> None:
        """Begin the block."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        """Contain an exception: one request must not end the engine for others."""
        if not isinstance(error, Exception):
            return False
        self._boundary.failed(self._request, error)
        if self._give_up is not None:
            self._give_up()
        return True


def _named(request: object) -> str:
    return f"'{printable(request, in_ascii=True)}'"


def _shown(why: object) -> str:
    return printable(why, _LONGEST, in_ascii=True)


def _calls(error: Exception) -> str:
    """The calls that led to an exception, without its text, which may have lines of its own."""
    calls = "".join(traceback.format_tb(error.__traceback__)).rstrip()
    return f"\n{type(error).__name__} in\n{calls}"
