"""Adapters: the content of each adapter as the workers hold it, in the scheduler's process.

Workers report the digests of the tensors that they hold whenever these change. A request whose
adapter no worker holds waits until the workers have loaded and named it, which takes a step.
Invariant: a name is given only while all workers hold the adapter and have answered the last
question. Cost: some dictionary look-ups per request and step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtrie.engines.vllm.weights import combined

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from vllm.lora.request import LoRARequest

__all__ = ["Adapters"]


class Adapters:
    """Names of held adapters, by vLLM's numbers of adapters.

    Args:
        ranks: the workers.

    Attributes:
        question: the number of times that workers were asked.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self.question = 0
        self._held: dict[int, dict[int, bytes]] = {rank: {} for rank in sorted(ranks)}
        self._answered = set[int](self._held)
        self._wanted: dict[int, LoRARequest] = {}
        self._reloads: dict[str, int] = {}  # the question with which a request's adapter is read

    @property
    def settled(self) -> bool:
        """Whether all workers have answered the last question."""
        return len(self._answered) == len(self._held)

    def doubt(self) -> None:
        """Ask workers again."""
        self.question += 1
        self._answered = set[int]()

    def on_held(self, rank: int, question: int, held: Mapping[int, bytes]) -> None:
        """Take in the adapters that a worker holds after it has seen the question of a number."""
        self._held[rank] = dict(held)
        if question == self.question:
            self._answered.add(rank)

    def name(self, adapter: LoRARequest) -> str | None:
        """Return the name of an adapter's content; None if it is not known."""
        digests = self.digests(adapter.lora_int_id)
        if not self.settled or not all(digests.values()):
            return None
        return combined(digests.values()).hex()

    def digests(self, ident: int) -> dict[int, bytes]:
        """Return the digest of an adapter by rank; empty where a rank does not hold it."""
        return {rank: held.get(ident, b"") for rank, held in self._held.items()}

    def awaits(self, request_id: str, adapter: LoRARequest) -> bool:
        """Whether a request has to wait for the name of its adapter; asks workers once for it.

        vLLM reads the files of an adapter again for a request that says so, so the workers do that
        before the request is matched.
        """
        if not self.settled:
            return True
        fresh = not adapter.load_inplace or self._reloads.get(request_id, self.question + 1) <= (
            self.question
        )
        if fresh and all(adapter.lora_int_id in held for held in self._held.values()):
            return False
        self.doubt()
        self._wanted[adapter.lora_int_id] = adapter
        if adapter.load_inplace:
            self._reloads[request_id] = self.question
        return True

    def take_wanted(self) -> list[LoRARequest]:
        """Return the adapters that workers have to load with the next orders."""
        wanted, self._wanted = [*self._wanted.values()], {}
        return wanted

    def ended(self, request_id: str) -> None:
        """Forget a request."""
        self._reloads.pop(request_id, None)
