"""Questions: queries a shared store about prompts on separate threads.

Invariant: only `Question.wait` waits, at most until the question's deadline. While every thread is
in a late call, questions are refused.
Cost: at most four threads, which end after an idle second, and a message to a thread per question.
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
    """A query for the blocks of a prompt.

    Attributes:
        path: tokens of the blocks.
        scope: their scope.
        local_blocks: leading blocks on faster tiers, not queried.
        keys: content keys `(blocks, 32)` of the blocks after them.
        deadline: end of the wait for an answer, nanoseconds of the clock.
        found: the answer, once received.
        error: the exception of the store instead of an answer.
        refused: whether every thread was in a late call.
        closed: whether the query has ended.
        search: the query of separate groups of layers, or None with a single group.
        wanted: leading blocks to load to host memory, set after the answer.
    """

    path: NDArray[np.uint32]
    scope: Scope | None
    local_blocks: int
    keys: NDArray[np.uint8]
    deadline: int
    found: Found | None = None
    error: Exception | None = None
    refused: bool = False
    closed: bool = False
    search: GroupSearch | None = None
    wanted: int = 0
    # An event breaks if Ctrl-C interrupts it.
    _over: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        """Begin the wait for the answer."""
        self._over.acquire()

    def close(self) -> None:
        """End the wait for the answer."""
        self.closed = True
        self._over.release()

    def wait(self, clock: Callable[[], int]) -> Found | None:
        """Return the answer, or None if the deadline passed first.

        Raises:
            Exception: the exception of the store.
        """
        while not self.closed and (left := self.deadline - clock()) > 0:
            self._over.acquire(timeout=min(left / _NS, threading.TIMEOUT_MAX))
        if self.error is not None:
            raise self.error
        return self.found


class Questions:
    """The queries to a store.

    Args:
        find: returns the leading blocks of keys found in the store, up to a deadline of
            `monotonic_ns`.
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
        """Ask a question, or refuse it if every thread is in a late call."""
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
        """End each thread after its current call."""
        for _ in range(_THREADS):
            self._queue.put(None)

    def _work(self) -> None:
        me = threading.current_thread()
        while True:
            try:
                question = self._queue.get(timeout=_IDLE_S)
            except queue.Empty:
                # `ask` puts before it counts threads, so `ask` or this thread sees the change.
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
        except Exception as error:  # noqa: BLE001 - the next question is still asked
            question.error = error
        finally:
            question.close()
