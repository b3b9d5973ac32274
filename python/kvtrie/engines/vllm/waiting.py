"""State of requests that vLLM has asked about and that have not ended.

Invariant: an answer is reused only until the lookup result may have changed.
Cost: a comparison of numbers per question.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from kvtrie.engines.vllm.running import GrowingTokens
    from kvtrie.engines.vllm.store_client import Question
    from kvtrie.settings.scope import Scope

__all__ = ["Answer", "Promise", "WaitingRequest"]


class Promise(NamedTuple):
    """Tokens of vLLM's own hit, and the end of kvtrie's hit, as reported to vLLM."""

    local: int
    end: int


class Answer(NamedTuple):
    """The last answer to vLLM about a waiting request, and its validity.

    Attributes:
        generation: the manager's.
        length: tokens of the request.
        promise: the reported hits.
        found: the tokens of it, or None for a request that has to wait.
    """

    generation: int
    length: int
    promise: Promise
    found: int | None


@dataclass(slots=True)
class WaitingRequest:
    """A request that has come and not ended.

    Attributes:
        tokens: its tokens.
        scope: the scope of its blocks; None if it has none.
        prompt: tokens of its prompt when the scope was read.
        identity: the name of the weights and adapter that the scope was formed of.
        session: the conversation that it belongs to.
        ends: whether that is over with it.
        waits_until: the time up to which it waits for what is to come; 0 before it waits.
        gave_up: whether it waits no longer, and was counted for that.
        proofs_until: the time up to which it waits for proofs of its blocks; 0 before it waits.
        prefetched: blocks on host at the last prefetch; -1 before one.
        pins: pins of the manager on blocks that wait on host for the others.
        pinned: the number of pinned blocks.
        from_disk: tokens that were only on disk when it arrived.
        from_store: tokens that were only in the shared store then.
        question: the question to the shared store about it that is open.
        asked_at: when that was asked; 0 before one.
        sure: leading blocks that the shared store may be used for; None before an answer.
        coming: whether a block of it was on its way when it was looked up last.
        promise: the hits last reported to vLLM.
        shut: an error has taken it out of the cache for good.
        asked: whether it asks why its tokens are computed.
        why: the answer to that, once it was admitted.
        counted: tokens of its prompt up to which the computed ones are counted by cause.
        answer: that, if it holds as long as nothing changes.
    """

    tokens: GrowingTokens
    scope: Scope | None
    prompt: int
    identity: str | None = ""
    session: str | None = None
    ends: bool = False
    waits_until: int = 0
    gave_up: bool = False
    proofs_until: int = 0
    prefetched: int = -1
    pins: list[int] = field(default_factory=list[int])
    pinned: int = 0
    from_disk: int = 0
    from_store: int = 0
    question: Question | None = None
    asked_at: int = 0
    sure: int | None = None
    coming: bool = False
    promise: Promise = field(default_factory=lambda: Promise(0, 0))
    shut: bool = False
    asked: bool = False
    why: dict[str, Any] | None = None
    counted: int = 0
    answer: Answer | None = None

    def forget_store(self) -> None:
        """Have the shared store asked again."""
        self.question, self.asked_at, self.sure = None, 0, None

    def valid_answer(self, generation: int, local: int, now: int) -> Answer | None:
        """Return the last answer if it is valid: until a change, a wait also until its deadline."""
        answer = self.answer
        if answer is None or answer[:2] != (generation, self.tokens.count()):
            return None
        if answer.promise.local != local or (answer.found is None and now >= self.waits_until):
            return None
        return answer
