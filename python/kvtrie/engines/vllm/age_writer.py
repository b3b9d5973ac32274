"""AgeWriter: a thread that writes ages of blocks into the files of a tier while a server runs.

Invariant: a caller never waits for a device; rows that a slow device cannot take are dropped, the
oldest first, and a failure is only logged: the blocks are found all the same.
Cost: a thread that sleeps.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import Protocol

from kvtrie import Index
from kvtrie.at_exit import end_at_exit
from kvtrie.errors import KvtrieError

__all__ = ["AgeWriter", "Aged"]

_LOG = logging.getLogger("vllm.kvtrie")  # whose lines vLLM shows
_MOST_WAITING = 64  # steps whose rows may wait for the device

_Rows = list[tuple[bytes, int, int, int, *tuple[int, ...]]]


class Aged(Protocol):
    """A tier that keeps ages and uses of its blocks for the next process."""

    def wall(self) -> int:
        """Return the time of the wall clock, in nanoseconds."""
        ...

    def note_uses(self, index: Index, wall: int | None = None) -> object:
        """Note ages and uses of the blocks of an index, as of a time of the wall clock."""
        ...


class AgeWriter:
    """The thread, and the rows that wait for it.

    Args:
        disk: the disk, or the kept host memory, that is written.
        deadline_s: how long `close` waits for the device.
    """

    def __init__(self, disk: Aged, deadline_s: float) -> None:
        self._disk, self._deadline_s = disk, deadline_s
        self._waiting: deque[tuple[_Rows, int]] = deque(maxlen=_MOST_WAITING)
        self._news, self._closed = threading.Condition(), False
        self._thread = threading.Thread(target=self._work, name="kvtrie-ages", daemon=True)
        self._thread.start()
        end_at_exit(self._thread, self._end)

    def write(self, rows: _Rows) -> None:
        """Have rows of the disk's index written down soon."""
        if rows:
            with self._news:
                self._waiting.append((rows, self._disk.wall()))
                self._news.notify()

    def close(self) -> None:
        """Write what waits and end the thread; one that hangs is left behind."""
        self._end()
        self._thread.join(self._deadline_s)

    def _end(self) -> None:
        with self._news:
            self._closed = True
            self._news.notify()

    def _work(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                rows, wall = self._waiting.popleft()
            try:
                self._disk.note_uses(Index(rows), wall)
            except KvtrieError as error:
                _LOG.warning("kvtrie: ages of %d blocks were not written: %s", len(rows), error)
