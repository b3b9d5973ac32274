"""Batch numbers: those of a publisher's messages, which only grow, also over restarts.

They start at the wall clock in microseconds, so that a publisher which starts again goes on above
the numbers of the one before. A file keeps a bound of the numbers in use, for the case that the
clock was set back.
Invariant: a number is above all earlier ones, of this process and of those before that wrote the
file. Cost: a file written once per `RESERVED` numbers.
"""

from __future__ import annotations

from pathlib import Path

from kvtrie.errors import ConfigError
from kvtrie.input import read_text
from kvtrie.output import write_output
from kvtrie.settings.argument import folder, shown

__all__ = ["RESERVED", "BatchNumbers"]

RESERVED = 1 << 20
"""Numbers that a file is written for at once."""

_HIGHEST = (1 << 63) - 1
_MOST_DIGITS = 20


class BatchNumbers:
    """Numbers of messages.

    Args:
        file: its path; None keeps none.
        clock_us: the wall clock, in microseconds.

    Attributes:
        last: the latest number; that before the first, at the start.
        unwritten: how often the file could not be written; numbers went on without.

    Raises:
        ConfigError: the file has something else than a number, or cannot be written.
    """

    def __init__(self, file: object, clock_us: int) -> None:
        self._file = None if file is None else Path(folder("number_file", file))
        self.last = max(clock_us, self._bound() + 1) - 1
        self.unwritten = 0
        self._reserved = self.last
        if self._file is not None:
            self._reserve(self._file)

    def take(self) -> int:
        """Return the next number."""
        self.last += 1
        if self._file is not None and self.last > self._reserved:
            try:
                self._reserve(self._file)
            except ConfigError:
                self.unwritten += 1
        return self.last

    def close(self) -> None:
        """Write the last number itself."""
        if self._file is not None:
            try:
                write_output(self._file, f"{self.last}\n")
            except ConfigError:
                self.unwritten += 1

    def _reserve(self, file: Path) -> None:
        bound = self.last + RESERVED
        write_output(file, f"{bound}\n", durable=True)
        self._reserved = bound

    def _bound(self) -> int:
        """The number that the file has; 0 without a file."""
        if self._file is None or not self._file.exists():
            return 0
        text = read_text(self._file, "the batch numbers").strip()
        plain = text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS
        if not plain or int(text) >= _HIGHEST - RESERVED:
            raise ConfigError(
                f"number_file {self._file} has {shown(text)}, a number below "
                f"{_HIGHEST - RESERVED} wanted; another file of yours?"
            )
        return int(text)
