"""Identity: the weights and the adapter of each request, in the scheduler's process.

Workers report the digest of their weights at start, and again on request after a vLLM call with a
possible change of weights. Until all have answered, nothing is found and nothing is committed.
Invariant: KV of two identities never matches. After a change, all blocks in vLLM's memory are stale
until a request of the new identity writes them. vLLM's own prefix cache knows an adapter only by
name and may still serve stale blocks. A request reading a stale block stores nothing.
Cost: a comparison per request and step. For adapters, see `Adapters`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtrie.engines.vllm.adapters import Adapters
from kvtrie.engines.vllm.weights import combined

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from vllm.v1.request import Request

__all__ = ["Identity"]

_ALL = None  # instead of the name of an adapter


class Identity:
    """Weights and adapters of requests.

    Args:
        digests: by rank, the digest of its weights at start.
        slots: blocks of vLLM's memory.

    Attributes:
        question: the number of questions about the weights so far.
        known: whether all workers have answered the last question.
        adapters: the adapters of the workers.
        awaited: whether vLLM has matched a request since the last questions.
    """

    def __init__(self, digests: Mapping[int, bytes], slots: int) -> None:
        self.question, self.known = 0, True
        self._asked = 0, 0
        self.awaited = False
        self._ranks, self._slots = sorted(digests), slots
        self._first = combined(digests[rank] for rank in self._ranks)
        self._weights = ""  # the name of the weights, "" for the first weights
        self._answers: dict[int, bytes] = {}
        self.adapters = Adapters(self._ranks)
        self._contents: dict[str, str] = {}  # the last content of each name of an adapter
        self._stale: dict[str | None, set[int]] = {}

    def known_for(self, request: Request) -> bool:
        """Return whether all workers have answered the last questions about a request."""
        return self.known and (request.lora_request is None or self.adapters.known)

    def request_rehash(self, *, weights: bool = True) -> None:
        """Ask workers again for their adapters and their weights."""
        self.adapters.request_rehash()
        if weights:
            self.question, self.known, self._answers = self.question + 1, False, {}

    def questions(self, *, computes: bool) -> tuple[int, int]:
        """Return the numbers of the questions to the workers about weights and adapters.

        A sleeping engine still has steps for copies, but its weights must not be read. So a step
        repeats the last numbers if it computes nothing and vLLM has matched no request.

        Args:
            computes: whether the step computes anything.
        """
        if computes or self.awaited:
            self._asked, self.awaited = (self.question, self.adapters.question), False
        return self._asked

    def on_answer(self, rank: int, question: int, digest: bytes) -> None:
        """Record a worker's answer to a question."""
        if self.known or question != self.question:
            return
        self._answers[rank] = digest
        if len(self._answers) == len(self._ranks):
            self.known = True
            now = combined(self._answers[rank] for rank in self._ranks)
            weights = "" if now == self._first else now.hex()
            if weights != self._weights:
                self._weights = weights
                self._change(_ALL)

    def awaits(self, request: Request) -> bool:
        """Return whether a request has to wait until the workers have hashed its adapter."""
        adapter = request.lora_request
        return adapter is not None and self.adapters.awaits(request.request_id, adapter)

    def name(self, request: Request) -> str | None:
        """Return the name of a request's weights and adapter, or None if it is not known.

        The weights at start have the empty name, because they are part of the model's name.
        """
        adapter = request.lora_request
        if adapter is None:
            return self._weights
        name = self.adapters.name(adapter)
        if name is None:
            return None
        if self._contents.setdefault(adapter.lora_name, name) != name:
            self._contents[adapter.lora_name] = name
            self._change(adapter.lora_name)
        return f"{self._weights} {name}"

    @property
    def weights(self) -> str:
        """The name of the weights, without an adapter."""
        return self._weights

    def reads_stale(self, request: Request, slots: Iterable[int]) -> bool:
        """Return whether a request reads any stale slot."""
        if not self._stale:
            return False
        adapter = _ALL if request.lora_request is None else request.lora_request.lora_name
        stale = [self._stale.get(key, set[int]()) for key in {_ALL, adapter}]
        return not all(each.isdisjoint(slots) for each in stale)

    def written(self, slots: Iterable[int]) -> None:
        """Record the slots written by a request."""
        for adapter, stale in list(self._stale.items()):
            stale.difference_update(slots)
            if not stale:
                del self._stale[adapter]

    def _change(self, adapter: str | None) -> None:
        self._stale[adapter] = set(range(self._slots))
