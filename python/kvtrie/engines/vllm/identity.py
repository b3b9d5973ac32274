"""Identity: the weights and the adapter that a request computes with, as the scheduler knows them.

Workers name their weights at start, and again when they are asked because a call of vLLM's may have
changed them. Until all have answered nothing is found and nothing is committed.
Invariant: KV of two identities never matches. Blocks in vLLM's memory that were written before a
change are stale until a request of the new identity writes them: vLLM's own prefix cache knows an
adapter by its name only and may still serve them, and a request that reads one stores nothing.
Cost: a comparison per request and step; with adapters, see `Adapters`.
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
    """Weights and adapters that requests compute with.

    Args:
        digests: of the weights of each rank, at start.
        slots: blocks of vLLM's memory.

    Attributes:
        question: the number of times that workers were asked for their weights.
        settled: whether all have answered the last of these questions.
        adapters: the adapters that they hold.
        awaited: whether vLLM has asked about a request since the last questions.
    """

    def __init__(self, digests: Mapping[int, bytes], slots: int) -> None:
        self.question, self.settled = 0, True
        self._asked = 0, 0
        self.awaited = False
        self._ranks, self._slots = sorted(digests), slots
        self._first = combined(digests[rank] for rank in self._ranks)
        self._weights = ""  # the name of other weights than the first
        self._answers: dict[int, bytes] = {}
        self.adapters = Adapters(self._ranks)
        self._contents: dict[str, str] = {}  # the last content of each name of an adapter
        self._stale: dict[str | None, set[int]] = {}

    def settled_for(self, request: Request) -> bool:
        """Whether all workers have answered the last questions that concern a request."""
        return self.settled and (request.lora_request is None or self.adapters.settled)

    def doubt(self, *, weights: bool = True) -> None:
        """Ask workers again for the adapters that they hold, and for their weights."""
        self.adapters.doubt()
        if weights:
            self.question, self.settled, self._answers = self.question + 1, False, {}

    def questions(self, *, computes: bool) -> tuple[int, int]:
        """Return the numbers of the questions about weights and adapters that workers get.

        While the engine sleeps its steps go on for copies, and its weights must not be read. So the
        last numbers stay in a step that computes nothing and before which vLLM matched no request.

        Args:
            computes: whether the step computes anything.
        """
        if computes or self.awaited:
            self._asked, self.awaited = (self.question, self.adapters.question), False
        return self._asked

    def on_answer(self, rank: int, question: int, digest: bytes) -> None:
        """Take in a worker's answer to the question of a number."""
        if self.settled or question != self.question:
            return
        self._answers[rank] = digest
        if len(self._answers) == len(self._ranks):
            self.settled = True
            now = combined(self._answers[rank] for rank in self._ranks)
            weights = "" if now == self._first else now.hex()
            if weights != self._weights:
                self._weights = weights
                self._change(_ALL)

    def awaits(self, request: Request) -> bool:
        """Whether a request has to wait until the workers have named its adapter."""
        adapter = request.lora_request
        return adapter is not None and self.adapters.awaits(request.request_id, adapter)

    def name(self, request: Request) -> str | None:
        """Return the name of what a request computes with; None if that is not known.

        It is empty for the weights that the server began with: they are part of the model's name.
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
        """Whether any of the slots that a request reads was written by something else."""
        if not self._stale:
            return False
        adapter = _ALL if request.lora_request is None else request.lora_request.lora_name
        stale = [self._stale.get(key, set[int]()) for key in {_ALL, adapter}]
        return not all(each.isdisjoint(slots) for each in stale)

    def written(self, slots: Iterable[int]) -> None:
        """Note that a request writes slots."""
        for adapter, stale in list(self._stale.items()):
            stale.difference_update(slots)
            if not stale:
                del self._stale[adapter]

    def _change(self, adapter: str | None) -> None:
        self._stale[adapter] = set(range(self._slots))
