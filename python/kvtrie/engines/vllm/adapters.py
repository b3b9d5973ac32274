"""Adapters: digests of the adapters loaded in the workers, in the scheduler's process.

Workers report the digests of their adapters on every change. A request for an adapter not loaded
yet waits a step, until all workers have loaded and hashed the adapter.
Invariant: an adapter has a name only while all workers hold it and have answered the last
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
        question: the number of questions to the workers so far.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self.question = 0
        self._held: dict[int, dict[int, bytes]] = {rank: {} for rank in sorted(ranks)}
        self._answered = set[int](self._held)
        self._wanted: dict[int, LoRARequest] = {}
        self._reloads: dict[str, int] = {}  # by request, the question sent with its reload

    @property
    def known(self) -> bool:
        """Whether all workers have answered the last question."""
        return len(self._answered) == len(self._held)

    def request_rehash(self) -> None:
        """Ask workers again."""
        self.question += 1
        self._answered = set[int]()

    def on_held(self, rank: int, question: int, held: Mapping[int, bytes]) -> None:
        """Record a worker's adapters and the number of the last question it has answered."""
        self._held[rank] = dict(held)
        if question == self.question:
            self._answered.add(rank)

    def name(self, adapter: LoRARequest) -> str | None:
        """Return the name of an adapter's content, or None if it is not known."""
        digests = self.digests(adapter.lora_int_id)
        if not self.known or not all(digests.values()):
            return None
        return combined(digests.values()).hex()

    def digests(self, ident: int) -> dict[int, bytes]:
        """Return the digest of an adapter by rank, or b"" for ranks without the adapter."""
        return {rank: held.get(ident, b"") for rank, held in self._held.items()}

    def awaits(self, request_id: str, adapter: LoRARequest) -> bool:
        """Return whether a request waits for its adapter's name.

        Asks the workers for the name once. For a request with `load_inplace` vLLM reads the
        adapter's files again. The workers do so before the request is matched.
        """
        if not self.known:
            return True
        fresh = not adapter.load_inplace or self._reloads.get(request_id, self.question + 1) <= (
            self.question
        )
        if fresh and all(adapter.lora_int_id in held for held in self._held.values()):
            return False
        self.request_rehash()
        self._wanted[adapter.lora_int_id] = adapter
        if adapter.load_inplace:
            self._reloads[request_id] = self.question
        return True

    def take_wanted(self) -> list[LoRARequest]:
        """Return the adapters for the workers to load with the next orders."""
        wanted, self._wanted = [*self._wanted.values()], {}
        return wanted

    def ended(self, request_id: str) -> None:
        """Forget a request."""
        self._reloads.pop(request_id, None)
