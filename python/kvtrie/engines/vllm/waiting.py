"""State of requests that vLLM has asked about and that have not ended.

Invariant: an answer is reused only until the lookup result may have changed.
Cost: a comparison of numbers per question.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from kvtrie.transfer.prefetch import PinnedPrefix

if TYPE_CHECKING:
    from kvtrie.engines.vllm.sequence import RequestSequence
    from kvtrie.settings.scope import Scope
    from kvtrie.transfer.store_question import Question

__all__ = ["Answer", "StoreLookup", "Wait", "WaitingRequest"]


class Answer(NamedTuple):
    """The last answer to vLLM about a waiting request, and its validity.

    Attributes:
        generation: the manager's.
        known: tokens of the request.
        start: the end of vLLM's own hit.
        end: the end of kvtrie's hit, or None for a request that has to wait.
    """

    generation: int
    known: int
    start: int
    end: int | None


@dataclass(slots=True)
class Wait:
    """The wait of a request for blocks that are not in host memory.

    Attributes:
        until: the time up to which it waits; 0 before it waits.
        coming: whether a block of it was on its way when it was looked up last.
        prefetched: blocks in host memory at the last prefetch; -1 before one.
        gave_up: whether it waits no longer, and was counted for that.
    """

    until: int = 0
    coming: bool = False
    prefetched: int = -1
    gave_up: bool = False


@dataclass(slots=True)
class StoreLookup:
    """The lookup of a request in a shared store.

    Attributes:
        question: the question that is open.
        asked_at: when that was asked; 0 before one.
        sure: leading blocks that the store may be used for; None before an answer.
    """

    question: Question | None = None
    asked_at: int = 0
    sure: int | None = None


@dataclass(slots=True)
class WaitingRequest:
    """A request that has come and not ended.

    Attributes:
        sequence: its tokens, as the manager has them.
        scope: the scope of its blocks; None if it has none.
        prompt: tokens of its prompt when the scope was read.
        identity: the name of the weights and adapter that the scope was formed of.
        session: the conversation that it belongs to.
        ends: whether that is over with it.
        wait: its wait for blocks that are not in host memory.
        proofs_until: the time up to which it waits for proofs of its blocks; 0 before it waits.
        pinned: blocks in host memory that wait for the others.
        from_disk: tokens that were only on disk when it arrived.
        from_store: tokens that were only in the shared store then.
        store: its lookup in the shared store.
        start: the end of vLLM's own hit, when it was asked about last.
        shut: an error has taken it out of the cache for good.
        asked: whether it asks why its tokens are computed.
        why: the answer to that, once it was admitted.
        counted: the end of its prompt up to which the computed tokens are counted by cause.
        answer: the last answer to vLLM, if it holds as long as nothing changes.
        begun: the name of the weights and adapter that it was admitted under first; None before. A
            request that has begun under other weights stores nothing.
    """

    sequence: RequestSequence
    scope: Scope | None
    prompt: int
    identity: str | None = ""
    session: str | None = None
    ends: bool = False
    wait: Wait = field(default_factory=Wait)
    proofs_until: int = 0
    pinned: PinnedPrefix = field(default_factory=PinnedPrefix)
    from_disk: int = 0
    from_store: int = 0
    store: StoreLookup = field(default_factory=StoreLookup)
    start: int = 0
    shut: bool = False
    asked: bool = False
    why: dict[str, Any] | None = None
    counted: int = 0
    answer: Answer | None = None
    begun: str | None = None

    def look_up_again(self) -> None:
        """Forget its wait and what a shared store has of it."""
        self.wait, self.store = Wait(), StoreLookup()

    def valid_answer(self, generation: int, start: int, now: int) -> Answer | None:
        """Return the last answer if it is valid: until a change, a wait also until its deadline."""
        answer = self.answer
        if answer is None or answer[:3] != (generation, self.sequence.known, start):
            return None
        return None if answer.end is None and now >= self.wait.until else answer

    def sources(self, loaded: int) -> tuple[int, int, int]:
        """Tokens of a hit that came from host memory, from disk, and from a shared store."""
        store = min(self.from_store, loaded)
        disk = min(self.from_disk, loaded - store)
        return loaded - store - disk, disk, store
