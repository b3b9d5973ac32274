"""Matching: answers to vLLM's question how many tokens of a waiting request host memory has.

Invariant: an answer counts only blocks that are complete and verified in host memory. A request
waits for blocks on disk, or on their way, no longer than the deadline.
Cost: one lookup per question after the manager's books have changed, else a comparison of numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtrie.engines.vllm.books import HOST, Books
from kvtrie.engines.vllm.waiting import Answer, Promise, WaitingRequest
from kvtrie.hint import Prefetch

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from vllm.v1.request import Request

    from kvtrie import MatchedBlock

__all__ = ["Matching"]


_THERE, _COMING, _DEEPER = "there", "coming", "deeper"


class Matching(Books):
    """The questions about requests that wait."""

    def match(self, request: Request, local: int) -> int | None:
        """Return the tokens after vLLM's own hit in host memory; None: ask again next step.

        Args:
            request: a request that waits.
            local: tokens that vLLM has itself, whole blocks.
        """
        with self._contained(request.request_id):
            return self._answer(request, local)
        return 0

    def _answer(self, request: Request, local: int) -> int | None:
        waiting, now, generation = (
            self._waiting_request(request),
            self._clock(),
            self.manager.generation,
        )
        if waiting.scope is not None and not self.identity.settled:
            waiting.promise = Promise(local, local)
            return None
        if self._resetting:
            waiting.promise = Promise(local, local)
            return 0
        if (answer := waiting.valid_answer(generation, local, now)) is not None:
            waiting.promise = answer.promise
            return answer.found
        found = self._match(waiting, local, now)
        # A prefetch issued in this call may be rejected, so this answer is not cached.
        sure = found is not None or waiting.coming
        waiting.answer = (
            Answer(generation, waiting.tokens.count(), waiting.promise, found) if sure else None
        )
        return found

    def _match(self, waiting: WaitingRequest, local: int, now: int) -> int | None:
        waiting.promise, waiting.coming = Promise(local, local), False
        if waiting.scope is None:
            return 0
        tokens = waiting.tokens.read()
        match = self.manager.lookup(tokens, now=now, scope=waiting.scope, keep=1)
        if match.tokens <= local:
            return 0
        first, count = local // self._size, match.tokens // self._size
        host = match.standing(HOST, skip=first)
        if self.proofs:
            host, waits = self.proofs.usable(match.blocks[first : first + host])
            if waits and self._may_await_proofs(waiting, now):
                return None
        if first + host < count:
            states = [self._state(block) for block in match.blocks[first:]]
            if not waiting.waits_until:
                waiting.from_disk = (len(states) - host) * self._size if _DEEPER in states else 0
            self._pin(waiting, match.handles[first:], host, now)
            near = sum(any(copy.tier <= HOST for copy in each.copies) for each in match.blocks)
            waiting.coming = _COMING in states
            if self._may_wait(waiting, host, near, now):
                return None
        elif not waiting.waits_until:
            waiting.from_disk = 0
        end = local + host * self._size
        waiting.promise = Promise(local, end)
        return end - local

    def _may_await_proofs(self, waiting: WaitingRequest, now: int) -> bool:
        """Whether a request waits for proofs of its blocks; no longer than the deadline."""
        waiting.proofs_until = waiting.proofs_until or now + self._deadline_ns
        return now < waiting.proofs_until

    def _state(self, block: MatchedBlock) -> str:
        """Return the state of a matched block as seen from host memory."""
        for copy in block.copies:
            if copy.tier == HOST and not copy.leaving:
                whole = (copy.layer_lo, copy.layer_hi) == (0, self._layers)
                return _THERE if whole else _COMING
        return _DEEPER

    def _may_wait(self, waiting: WaitingRequest, host: int, near: int, now: int) -> bool:
        """Prefetch deeper blocks into host memory; return whether the request waits for them.

        It waits no longer than the deadline, and not if nothing more can come.

        Args:
            waiting: the request.
            host: the number of its leading blocks in host memory.
            near: the number of its blocks there or above.
            now: the time.
        """
        if not self._deep and not waiting.coming:
            return False
        if not waiting.waits_until:
            waiting.waits_until = now + self._deadline_ns
        if now >= waiting.waits_until:
            self.counters.lost["disk too slow"] += 1
            return False
        if waiting.coming:
            return True
        if host <= waiting.prefetched:  # asked before, and no further: there is no room
            self.counters.lost["no room to bring up"] += 1
            waiting.waits_until = now
            return False
        tokens = waiting.tokens.read()
        prefetch = Prefetch(tokens=tokens, tier="host", scope=waiting.scope)
        (reply,) = self.manager.hint([prefetch], now=now)
        # Prefetch can be refused while loads of other requests fill the quota: retry then. A
        # request whose prefix did not grow after a granted prefetch gives up; otherwise requests
        # larger than host memory would evict each other's blocks forever.
        crowded = reply.code == "crowded" and reply.blocks <= near
        if not (crowded and self.manager.stats().moves):
            waiting.prefetched = host
        return True

    def _pin(
        self, waiting: WaitingRequest, handles: NDArray[np.uint64], host: int, now: int
    ) -> None:
        """Pin blocks in host memory until the rest arrives; without quota the request gives up."""
        if host > waiting.pinned and self._pinned + host - waiting.pinned <= self._most_pinned:
            new = handles[waiting.pinned : host]
            waiting.pins.append(self.manager.pin_copies(new, HOST, now=now))
            self._pinned += len(new)
            waiting.pinned = host
