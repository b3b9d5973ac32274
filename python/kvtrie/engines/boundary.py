"""Boundary: keeps what a request contains from ending its engine.

Invariant: no exception leaves a `with` block of a boundary; each is counted, and the 1st, 2nd, 4th,
8th and so on is logged. Cost: none until something fails.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtrie.errors import ConfigError

if TYPE_CHECKING:
    from logging import Logger
    from types import TracebackType

__all__ = ["Boundary"]


class Boundary:
    """Turns exceptions into requests that are not cached.

    The block returns its result; the code after it is the answer "not cached". A block must leave
    the books consistent wherever it fails.

    Args:
        name: what the log calls the part of the engine.
        logger: one whose lines the engine shows.

    Attributes:
        failures: the number of exceptions so far.
    """

    def __init__(self, name: str, logger: Logger) -> None:
        self._name, self._logger = name, logger
        self.failures = 0

    def __enter__(self) -> None:
        """Enter; boundaries may be nested."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        """Suppress any `Exception`."""
        if not isinstance(error, Exception):
            return False
        self.failures += 1
        if not self.failures & (self.failures - 1):
            # Content that kvtrie refuses by itself needs no traceback.
            shown = None if isinstance(error, ConfigError) else error
            self._logger.warning(
                "%s: a request is not cached (failure %d): %s",
                self._name,
                self.failures,
                str(error).encode("ascii", "backslashreplace").decode(),
                exc_info=shown,
            )
        return True
