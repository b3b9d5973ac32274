"""DeadlineCall: runs a possibly hanging call on a separate thread.

Invariant: the caller waits no longer than the deadline. A hung call occupies only its thread until
it returns.
Cost: a thread per call.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from kvtrie.at_exit import end_at_exit

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["DeadlineCall"]

_NS = 1_000_000_000


class DeadlineCall:
    """Start a call at once on a separate thread.

    Args:
        call: the call. Its result is dropped.
        clock: nanoseconds, monotone.

    Attributes:
        started_ns: start time.
        running: whether the call is still running.
    """

    def __init__(self, call: Callable[[], object], clock: Callable[[], int]) -> None:
        self.started_ns = clock()
        self._call = call
        self._clock = clock
        self._over = threading.Lock()  # an event breaks if Ctrl-C interrupts it
        self._over.acquire()
        self._error: BaseException | None = None
        self.running = True
        thread = threading.Thread(target=self._run, name="kvtrie-deadline", daemon=True)
        thread.start()
        end_at_exit(thread)

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return (self._clock() - self.started_ns) / _NS

    def wait(self, deadline_ns: int) -> bool:
        """Wait for the call up to its deadline and return whether the call has returned.

        Args:
            deadline_ns: nanoseconds from the start of the call.

        Raises:
            BaseException: the exception of the call.
        """
        left = self.started_ns + deadline_ns - self._clock()
        while self.running:
            if self._over.acquire(timeout=min(max(0, left) / _NS, threading.TIMEOUT_MAX)):
                break
            left = self.started_ns + deadline_ns - self._clock()
            if left <= 0 and self.running:
                return False
        if self._error is not None:
            raise self._error
        return True

    def _run(self) -> None:
        try:
            self._call()
        except BaseException as caught:  # noqa: BLE001 - raised by `wait`
            self._error = caught
        finally:
            self.running = False
            self._over.release()
