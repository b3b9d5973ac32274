"""Ends threads before the interpreter ends.

At the end of a process Python ends a daemon thread when it acquires the interpreter's lock. Within
a native call, of torch or of a store's client, this unwinds C++ frames not made for it: the
process ends with "terminate called without an active exception" and status 134. So each thread with
native calls is asked to end, and awaited, while the interpreter is whole.
Invariant: hanging calls delay the end of the process by at most five seconds in all. Cost: none
until then. Decision 0017 has the reasons.
"""

from __future__ import annotations

import atexit
import time
from contextlib import suppress
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, WeakMethod

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

__all__ = ["end_at_exit"]

_PATIENCE_S = 5.0
_ENDS: WeakKeyDictionary[threading.Thread, WeakMethod[Callable[[], object]] | None] = (
    WeakKeyDictionary()
)


def end_at_exit(thread: threading.Thread, end: Callable[[], object] | None = None) -> None:
    """Have a daemon thread end before the interpreter does.

    Args:
        thread: the thread.
        end: a method to ask the thread to end, without waiting. Its object is not kept alive. None
            for a thread that makes a single call.
    """
    _ENDS[thread] = None if end is None else WeakMethod(end)


@atexit.register
def _end_all() -> None:
    # A fork's copy has no live threads.
    threads = [thread for thread in list(_ENDS) if thread.is_alive()]
    for thread in threads:
        method = _ENDS[thread]
        end = None if method is None else method()
        with suppress(Exception):  # a broken owner must not keep the rest from ending
            if end is not None:
                end()
    until = time.monotonic() + _PATIENCE_S
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
