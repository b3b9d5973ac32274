"""Section: the lock of what several threads change, in which Ctrl-C waits.

Python raises what a handler of SIGINT raises between any two bytecodes of the main thread, also
within `threading.Condition`, and half a change would stay. So the handler is set aside while the
main thread is in a section, and called when it leaves: everything that is changed in a section is
changed wholly or not at all. A thread that has to wait takes a ticket and waits outside.
Invariant: a section is left as it was entered, whatever is raised; in another process than the one
that made it, which `fork` gives a copy, it is never entered, for its lock may be held there for
ever. Cost: two changes of a handler per outermost section of the main thread, about a microsecond;
elsewhere that of the lock.
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

_RAW: Any = import_module("_signal")  # `signal` wraps it in conversions that take ten times as long


class Ticket:
    """The right to be woken by the next `Section.notify_all`.

    Args:
        seconds: to wait at most; None for no end.

    Attributes:
        over: whether it has been waited for.
    """

    __slots__ = ("_lock", "_seconds", "over")

    def __init__(self, seconds: float | None) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self.over = False
        self._seconds = -1.0 if seconds is None else min(seconds, threading.TIMEOUT_MAX)

    def wait(self) -> bool:
        """Block until it is woken or the time is over; return whether it was woken.

        Ctrl-C may interrupt the wait; no state is changed then.
        """
        try:
            return self._lock.acquire(timeout=self._seconds)
        finally:
            self.over = True

    def wake(self) -> None:
        """End the wait. A ticket is woken once."""
        self._lock.release()


class Section:
    """A lock that the thread which holds it may take again.

    Attributes:
        lock: the lock itself, for steps of a pass over layers, of which there are too many to put
            anything off in each, and which only that pass would miss.
    """

    __slots__ = ("_pid", "_tickets", "lock")

    def __init__(self) -> None:
        self._pid = os.getpid()
        self.lock = threading.RLock()
        self._tickets: list[Ticket] = []

    @property
    def here(self) -> bool:
        """Whether this is the process that made it."""
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
        except BaseException:  # of another signal's handler
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
        """From within: the right to be woken by the next change."""
        ticket = Ticket(seconds)
        self._tickets = [other for other in self._tickets if not other.over]
        self._tickets.append(ticket)
        return ticket

    def notify_all(self) -> None:
        """From within: wake every thread that waits."""
        tickets, self._tickets = self._tickets, []
        for ticket in tickets:
            ticket.wake()


class _Interrupts:
    """SIGINT while the main thread is in sections, of which it alone keeps count."""

    __slots__ = ("_came", "_depth", "_handler", "_note")

    def __init__(self) -> None:
        self._depth = 0
        self._came = False
        self._handler: Callable[[int, FrameType | None], object] | None = None
        self._note = self._keep  # one object, made once

    def put_off(self) -> None:
        """Enter a section. Before the handler is set, an interrupt leaves all state unchanged."""
        if not self._depth:
            self._came = False
            if callable(_RAW.getsignal(signal.SIGINT)):
                self._handler = _RAW.signal(signal.SIGINT, self._note)
        self._depth += 1

    def let_in(self) -> None:
        """Leave a section; leaving the outermost one raises an interrupt that came inside."""
        self._depth -= 1
        if self._depth or self._handler is None:
            return
        handler, self._handler = self._handler, None
        _RAW.signal(signal.SIGINT, handler)  # an interrupt from here on finds nothing to finish
        if self._came:
            self._came = False
            signal.raise_signal(signal.SIGINT)

    def _keep(self, _signal: int, _frame: FrameType | None) -> None:
        self._came = True


_INTERRUPTS = _Interrupts()
