"""StoreClient: the scheduler's questions to a shared store, on its own threads.

It only asks whether blocks are there; the workers read and write them. A block counts when the
store has the parts of all ranks.
Invariant: the scheduler never waits: a question without an answer by its deadline counts as no
block, and with every thread in a call that is late no question is taken. Cost: a hash per block and
rank of a prompt, and a round trip for those of which nothing is known.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from typing import TYPE_CHECKING

from kvtrie._kvtrie import ValueFormat
from kvtrie.at_exit import end_at_exit
from kvtrie.printable import MESSAGE, printable
from kvtrie.tiers.remote import Found, RemoteStorage
from kvtrie.tiers.remote.open import read_secret

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Self

    import numpy as np
    from numpy.typing import NDArray

    from kvtrie.engines.vllm.messages import Opened
    from kvtrie.engines.vllm.model import ServedModel
    from kvtrie.engines.vllm.settings import Settings

__all__ = ["Question", "StoreClient"]

_LOG = logging.getLogger("vllm.kvtrie")  # whose lines vLLM shows
_NS = 1_000_000_000
_THREADS = 4


class Question:
    """A question about the blocks of one request.

    Attributes:
        near: leading blocks of the request that are on faster tiers, which were not asked for.
        keys: content keys of the blocks after them.
        deadline: when the request waits no longer.
        found: the answer, once there is one.
        closed: set once a thread has finished with it.
    """

    __slots__ = ("closed", "deadline", "found", "keys", "near")

    def __init__(self, near: int, keys: NDArray[np.uint8], deadline: int) -> None:
        self.near, self.keys, self.deadline = near, keys, deadline
        self.found: Found | None = None
        self.closed = threading.Event()


class StoreClient:
    """Asks one store for blocks.

    Args:
        parts: storages, each with the formats of the ranks whose values have its length.
        lookup_s: seconds that a request waits for an answer.
        clock: nanoseconds, monotone.
    """

    def __init__(
        self,
        parts: Sequence[tuple[RemoteStorage, list[ValueFormat]]],
        lookup_s: float,
        clock: Callable[[], int],
    ) -> None:
        self._parts, self._clock = parts, clock
        self._lookup_ns = int(lookup_s * _NS)
        self._asked: list[Question] = []
        self._questions: queue.SimpleQueue[Question | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"kvtrie-lookup-{at}", daemon=True)
            for at in range(_THREADS)
        ]
        for thread in self._threads:
            thread.start()
            end_at_exit(thread, self._end)

    @classmethod
    def of_server(
        cls,
        settings: Settings,
        model: ServedModel,
        opened: Mapping[int, Opened],
        clock: Callable[[], int],
    ) -> Self | None:
        """The client of a server; None if it has no store, or uses only what it wrote itself.

        Raises:
            ConfigError: a store or secret that cannot be opened.
        """
        tier = settings.tiers[-1] if settings.tiers else None
        if tier is None or tier.kind != "remote" or tier.lookup == "local":
            return None
        secret = None if tier.secret_file is None else read_secret(tier.secret_file)
        forms: dict[tuple[int, int], list[ValueFormat]] = {}
        values = {each.values for each in opened.values() if each.values is not None}
        for layers, size, meaning in sorted(values):
            form = ValueFormat(
                layers=layers,
                layer_bytes=size,
                block_tokens=model.block_tokens,
                meaning=meaning,
                secret=secret,
            )
            forms.setdefault((layers, size), []).append(form)
        trust_s = 60.0 if tier.trust_s is None else tier.trust_s
        parts = [
            (
                RemoteStorage(
                    tier.path or "",
                    model.shape,
                    model.block_tokens,
                    form=same[0],
                    trust_s=trust_s,
                    clock=clock,
                ),
                same,
            )
            for same in forms.values()
        ]
        return cls(parts, settings.lookup_s, clock)

    def ask(self, near: int, keys: NDArray[np.uint8], now: int) -> Question | None:
        """Ask for blocks; None if every thread is in a call that is late.

        Args:
            near: leading blocks that are not asked for.
            keys: content keys `(blocks, 32)` of those after them.
            now: the time.
        """
        self._asked = [one for one in self._asked if not one.closed.is_set()]
        if sum(one.deadline <= now for one in self._asked) >= _THREADS:
            return None
        question = Question(near, keys, now + self._lookup_ns)
        self._asked.append(question)
        self._questions.put(question)
        return question

    def refute(self, keys: Sequence[bytes]) -> None:
        """Note that blocks could not be read: they are not asked for again for a while."""
        for storage, forms in self._parts:
            storage.refute(keys, forms)

    def forget(self) -> None:
        """Drop all beliefs; the store keeps its blocks."""
        for storage, _ in self._parts:
            storage.forget()

    def close(self) -> None:
        """End the threads, and give the connections back."""
        self._end()
        for storage, _ in self._parts:
            storage.close()

    def _end(self) -> None:
        for _ in self._threads:
            self._questions.put(None)

    def _work(self) -> None:
        while (question := self._questions.get()) is not None:
            try:
                left = question.deadline - self._clock()
                if left > 0:
                    question.found = self._find(question.keys, time.monotonic_ns() + left)
            except Exception as error:  # noqa: BLE001 - the next question is asked all the same
                _LOG.warning(
                    "kvtrie: a question to the shared store failed: %s",
                    printable(error, MESSAGE, in_ascii=True),
                )
            finally:
                question.closed.set()

    def _find(self, keys: NDArray[np.uint8], deadline: int) -> Found:
        """Leading blocks of which every rank's part is there."""
        answers = [storage.find(keys, deadline, forms) for storage, forms in self._parts]
        return Found(
            min(each.blocks for each in answers),
            sum(each.queried for each in answers),
            sum(each.refuted for each in answers),
            sum(each.late for each in answers),
        )
