"""Questions: what a shared store has of a prompt, asked on other threads.

Invariant: no call but `Question.wait` waits, and that no longer than the question's deadline; with
every thread in a call that is late no question is taken. Cost: at most four threads, which end once
nothing was asked for a second; a message to one of them per question.
"""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvtrie.at_exit import end_at_exit
from kvtrie.tiers.remote import Found

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from kvtrie import Scope
    from kvtrie.transfer.group_search import GroupSearch

__all__ = ["Question", "Questions"]

_NS = 1_000_000_000
_THREADS = 4
_IDLE_S = 1.0


@dataclass(slots=True, eq=False)
class Question:
    """A question about the blocks of one prompt.

    Attributes:
        path: tokens of the blocks.
        scope: their scope.
        near: leading blocks that are on faster tiers, which are not asked for.
        keys: content keys `(blocks, 32)` of the blocks after them.
        deadline: when nothing waits for an answer any longer, nanoseconds of the clock.
        found: the answer, once there is one.
        error: the exception of the store instead of it.
        refused: whether every thread was in a call that is late.
        closed: whether no thread works on it any longer.
        search: what is asked of groups of layers that are kept apart; None with one group.
        wanted: leading blocks that are to come to host memory, once the answer is taken in.
    """

    path: NDArray[np.uint32]
    scope: Scope | None
    near: int
    keys: NDArray[np.uint8]
    deadline: int
    found: Found | None = None
    error: Exception | None = None
    refused: bool = False
    closed: bool = False
    search: GroupSearch | None = None
    wanted: int = 0
    # An event breaks where Ctrl-C strikes within it.
    _over: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        """Begin the wait for it."""
        self._over.acquire()

    def close(self) -> None:
        """End the wait for it."""
        self.closed = True
        self._over.release()

    def wait(self, clock: Callable[[], int]) -> Found | None:
        """Return the answer; None if none came by the deadline.

        Raises:
            Exception: that of the store.
        """
        while not self.closed and (left := self.deadline - clock()) > 0:
            self._over.acquire(timeout=min(left / _NS, threading.TIMEOUT_MAX))
        if self.error is not None:
            raise self.error
        return self.found


class Questions:
    """The questions to one store.

    Args:
        find: returns which leading blocks of keys the store has, by a time of `monotonic_ns`.
        clock: nanoseconds, monotone.
    """

    def __init__(
        self, find: Callable[[NDArray[np.uint8], int], Found], clock: Callable[[], int]
    ) -> None:
        self._find, self._clock = find, clock
        self._asked: list[Question] = []
        self._queue: queue.SimpleQueue[Question | None] = queue.SimpleQueue()
        self._threads: set[threading.Thread] = set()

    def ask(self, question: Question, now: int) -> None:
        """Ask, unless every thread is in a call that is late: the question is refused then."""
        self._asked = [one for one in self._asked if not one.closed]
        if sum(one.deadline <= now for one in self._asked) >= _THREADS:
            question.refused = True
            question.close()
            return
        self._asked.append(question)
        self._queue.put(question)
        if len(self._threads) < _THREADS:
            thread = threading.Thread(target=self._work, name="kvtrie-lookup", daemon=True)
            self._threads.add(thread)
            thread.start()
            end_at_exit(thread, self.close)

    def close(self) -> None:
        """End the threads, each after its call."""
        for _ in range(_THREADS):
            self._queue.put(None)

    def _work(self) -> None:
        me = threading.current_thread()
        while True:
            try:
                question = self._queue.get(timeout=_IDLE_S)
            except queue.Empty:
                # `ask` puts before it counts threads: after this, one of the two sees the other.
                self._threads.discard(me)
                try:
                    question = self._queue.get_nowait()
                except queue.Empty:
                    return
                self._threads.add(me)
            if question is None:
                self._threads.discard(me)
                return
            self._answer(question)

    def _answer(self, question: Question) -> None:
        try:
            left = question.deadline - self._clock()
            if left > 0:
                until = time.monotonic_ns() + left
                keys, search = question.keys, question.search
                found = self._find(keys, until) if len(keys) else Found(0, 0, 0, 0)
                question.found = found if search is None else search.search(found, until)
        except Exception as error:  # noqa: BLE001 - the next question is asked all the same
            question.error = error
        finally:
            question.close()
