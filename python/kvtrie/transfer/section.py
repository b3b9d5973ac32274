"""Section: a lock that also delays Ctrl-C until the critical section ends.

Python may raise the exception of a SIGINT handler between any two bytecodes of the main thread,
even within `threading.Condition`, and leave a change half done. So the handler is replaced while
the main thread is in a section, and called when it leaves: every change in a section is complete or
absent. A waiting thread takes a ticket and waits outside.
Invariant: leaving a section restores the state at its entry, whatever is raised. A forked copy of
the process never enters it, because its lock may be held there forever.
Cost: two handler changes per outermost section of the main thread, about a microsecond. On other
threads only the lock.
"""

from __future__ import annotations

import os
import signal
import threading
from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvtrie.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

__all__ = ["Section", "Ticket"]

_RAW: Any = import_module("_signal")  # `signal` adds conversions that take ten times as long


class Ticket:
    """The right to be woken by the next `Section.notify_all`.

    Args:
        seconds: maximum wait, or None for no limit.

    Attributes:
        over: whether the wait has ended.
    """

    __slots__ = ("_lock", "_seconds", "over")

    def __init__(self, seconds: float | None) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self.over = False
        self._seconds = -1.0 if seconds is None else min(seconds, threading.TIMEOUT_MAX)

    def wait(self) -> bool:
        """Block until woken or timed out and return whether the ticket was woken.

        Ctrl-C may interrupt the wait without changing any state.
        """
        try:
            return self._lock.acquire(timeout=self._seconds)
        finally:
            self.over = True

    def wake(self) -> None:
        """End the wait. A ticket is woken once."""
        self._lock.release()


class Section:
    """A reentrant lock that delays Ctrl-C.

    Attributes:
        lock: the lock itself, for the frequent steps of a layer-wise pass. It skips the delay of
            Ctrl-C, so an interrupt can spoil only that pass.
    """

    __slots__ = ("_pid", "_tickets", "lock")

    def __init__(self) -> None:
        self._pid = os.getpid()
        self.lock = threading.RLock()
        self._tickets: list[Ticket] = []

    @property
    def in_own_process(self) -> bool:
        """Whether this process created the section."""
        return os.getpid() == self._pid

    def __enter__(self) -> None:
        if os.getpid() != self._pid:
            raise ConfigError(
                f"process {self._pid} made this, and process {os.getpid()} is a fork of it that "
                "cannot use its threads and its files: make one here"
            )
        if threading.get_ident() == threading.main_thread().ident:
            _INTERRUPTS.put_off()
        try:
            self.lock.acquire()
        except BaseException:  # raised by a signal handler
            if threading.get_ident() == threading.main_thread().ident:
                _INTERRUPTS.let_in()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            self.lock.release()
        finally:
            if threading.get_ident() == threading.main_thread().ident:
                _INTERRUPTS.let_in()

    def ticket(self, seconds: float | None) -> Ticket:
        """Return a ticket for the next change. Call it in the section."""
        ticket = Ticket(seconds)
        self._tickets = [other for other in self._tickets if not other.over]
        self._tickets.append(ticket)
        return ticket

    def notify_all(self) -> None:
        """Wake every waiting thread. Call it in the section."""
        tickets, self._tickets = self._tickets, []
        for ticket in tickets:
            ticket.wake()


class _Interrupts:
    """Delays SIGINT while the main thread is in sections. Only the main thread uses it."""

    __slots__ = ("_came", "_depth", "_handler", "_note")

    def __init__(self) -> None:
        self._depth = 0
        self._came = False
        self._handler: Callable[[int, FrameType | None], object] | None = None
        self._note = self._keep  # created once

    def put_off(self) -> None:
        """Enter a section. Before the handler is set, an interrupt leaves all state unchanged."""
        if not self._depth:
            self._came = False
            if callable(_RAW.getsignal(signal.SIGINT)):
                self._handler = _RAW.signal(signal.SIGINT, self._note)
        self._depth += 1

    def let_in(self) -> None:
        """Leave a section. Leaving the outermost section raises an interrupt received inside."""
        self._depth -= 1
        if self._depth or self._handler is None:
            return
        handler, self._handler = self._handler, None
        _RAW.signal(signal.SIGINT, handler)  # a later interrupt finds nothing to finish
        if self._came:
            self._came = False
            signal.raise_signal(signal.SIGINT)

    def _keep(self, _signal: int, _frame: FrameType | None) -> None:
        self._came = True


_INTERRUPTS = _Interrupts()
