"""State of matched and unfinished requests of vLLM.

Invariant: an answer is reused only until the lookup result may have changed.
Cost: a comparison of numbers per lookup.
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
        generation: the manager's generation.
        known: tokens of the request.
        start: the end of vLLM's own hit.
        end: the end of kvtrie's hit, or None if the request has to wait.
    """

    generation: int
    known: int
    start: int
    end: int | None


@dataclass(slots=True)
class Wait:
    """The wait of a request for blocks outside host memory.

    Attributes:
        until: the deadline, or 0 before the wait.
        coming: whether a block was in flight at the last lookup.
        prefetched: blocks in host memory at the last prefetch, or -1 before it.
        gave_up: whether it has stopped waiting, and was counted.
    """

    until: int = 0
    coming: bool = False
    prefetched: int = -1
    gave_up: bool = False


@dataclass(slots=True)
class StoreLookup:
    """The lookup of a request in a shared store.

    Attributes:
        question: the open question, or None.
        asked_at: the time of the question, or 0 before it.
        sure: the number of leading blocks usable from the store, or None before an answer.
    """

    question: Question | None = None
    asked_at: int = 0
    sure: int | None = None


@dataclass(slots=True)
class WaitingRequest:
    """State of an unfinished request.

    Attributes:
        sequence: its tokens, in the manager's sequence.
        scope: the scope of its blocks, or None if it is not cached.
        prompt: tokens of its prompt when the scope was read.
        identity: the name of the weights and adapter in its scope.
        session: its session.
        ends: whether the session ends with it.
        wait: its wait for blocks outside host memory.
        verification_until: the deadline for the verification of its blocks, or 0 before the wait.
        pinned: blocks pinned in host memory until the prefetched blocks arrive.
        from_disk: tokens only on disk when it arrived.
        from_store: tokens only in the shared store when it arrived.
        store: its lookup in the shared store.
        start: the end of vLLM's own hit at the last match.
        shut: whether an error has excluded it from the cache for good.
        asked: whether its client asks for a miss report.
        why: the miss report, after its admission.
        counted: the position up to which its computed tokens are counted by cause.
        answer: the last answer to vLLM, if it may be reused.
        first_identity: the name of the weights and adapter at its first admission, or None before.
            A request started under different weights stores nothing.
    """

    sequence: RequestSequence
    scope: Scope | None
    prompt: int
    identity: str | None = ""
    session: str | None = None
    ends: bool = False
    wait: Wait = field(default_factory=Wait)
    verification_until: int = 0
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
    first_identity: str | None = None

    def look_up_again(self) -> None:
        """Reset its wait and its lookup in a shared store."""
        self.wait, self.store = Wait(), StoreLookup()

    def valid_answer(self, generation: int, start: int, now: int) -> Answer | None:
        """Return the last answer if still valid: until a change, or the deadline of a wait."""
        answer = self.answer
        if answer is None or answer[:3] != (generation, self.sequence.known, start):
            return None
        return None if answer.end is None and now >= self.wait.until else answer

    def sources(self, loaded: int) -> tuple[int, int, int]:
        """Return the tokens of a hit from host memory, from disk, and from a shared store."""
        store = min(self.from_store, loaded)
        disk = min(self.from_disk, loaded - store)
        return loaded - store - disk, disk, store
