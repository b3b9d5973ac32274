"""Batch numbers: numbers of a publisher's messages, increasing even over restarts.

They start at the wall clock in microseconds, so a restarted publisher continues above its earlier
numbers. A file keeps an upper bound of the used numbers in case the clock is set back.
Invariant: a number is above all earlier numbers of this process and of earlier processes with the
same file. Cost: a file written once per `RESERVED` numbers.
"""

from __future__ import annotations

from pathlib import Path

from kvtrie.errors import ConfigError
from kvtrie.input import read_text
from kvtrie.output import write_output
from kvtrie.settings.argument import folder, shown

__all__ = ["RESERVED", "BatchNumbers"]

RESERVED = 1 << 20
"""Numbers reserved by each write of the file."""

_HIGHEST = (1 << 63) - 1
_MOST_DIGITS = 20


class BatchNumbers:
    """Numbers of messages.

    Args:
        file: its path. None keeps no file.
        clock_us: the wall clock, in microseconds.

    Attributes:
        last: the latest number. At the start, the number before the first.
        unwritten: number of failed writes of the file. Numbers continue without it.

    Raises:
        ConfigError: the file has no valid number, or is unwritable.
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
        """Return the number in the file, 0 without a file."""
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
