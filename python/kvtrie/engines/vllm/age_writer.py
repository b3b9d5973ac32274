"""AgeWriter: a thread for writing ages of blocks into the files of a tier while a server runs.

Invariant: a caller never waits for a device. If a slow device falls behind, the oldest rows are
dropped. A failure is only logged, because blocks are found without their ages.
Cost: a sleeping thread.
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

_LOG = logging.getLogger("vllm.kvtrie")  # below vLLM's logger, for its handlers
_MOST_WAITING = 64  # steps with rows waiting for the device

_Rows = list[tuple[bytes, int, int, int, *tuple[int, ...]]]


class Aged(Protocol):
    """A tier with ages and uses of its blocks stored for the next process."""

    def wall(self) -> int:
        """Return the wall clock time, in nanoseconds."""
        ...

    def note_uses(self, index: Index, wall: int | None = None) -> object:
        """Store ages and uses of the blocks of an index, as of a wall clock time."""
        ...


class AgeWriter:
    """The thread and its queue of rows.

    Args:
        disk: the disk or the kept host memory to write to.
        deadline_s: the most seconds `close` waits for the device.
    """

    def __init__(self, disk: Aged, deadline_s: float) -> None:
        self._disk, self._deadline_s = disk, deadline_s
        self._waiting: deque[tuple[_Rows, int]] = deque(maxlen=_MOST_WAITING)
        self._news, self._closed = threading.Condition(), False
        self._thread = threading.Thread(target=self._work, name="kvtrie-ages", daemon=True)
        self._thread.start()
        end_at_exit(self._thread, self._end)

    def write(self, rows: _Rows) -> None:
        """Queue rows of the disk's index for writing."""
        if rows:
            with self._news:
                self._waiting.append((rows, self._disk.wall()))
                self._news.notify()

    def close(self) -> None:
        """Write the queued rows and end the thread, or abandon it if it hangs."""
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
