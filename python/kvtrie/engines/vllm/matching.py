"""Matching: answers to vLLM's question how many tokens of a waiting request host memory has.

A shared store is asked once for the blocks that no faster tier has; those that it has are marked,
and then load as blocks on disk do.
Invariant: an answer counts only blocks that are complete and verified in host memory. A request
waits for a store's answer and for blocks that are not in host memory no longer than the deadline.
Cost: one lookup per question after the manager's books have changed, else a comparison of numbers.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from kvtrie.engines.vllm.books import HOST, Books
from kvtrie.engines.vllm.waiting import Answer, Promise, WaitingRequest
from kvtrie.errors import ConfigError, NoSpaceError
from kvtrie.settings.hint import Prefetch

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from vllm.v1.request import Request

    from kvtrie import Match, MatchedBlock
    from kvtrie.engines.vllm.store_client import Question

__all__ = ["Matching"]


_THERE, _COMING, _DEEPER, _STORED = "there", "coming", "deeper", "stored"


class Matching(Books):
    """The questions about requests that wait."""

    def match(self, request: Request, local: int) -> int | None:
        """Return the tokens after vLLM's own hit in host memory; None: ask again next step.

        Args:
            request: a request that waits.
            local: tokens that vLLM has itself, whole blocks.
        """
        with self._contained(request.request_id):
            if self.identity.awaits(request):
                return None
            start = self._native.stretch(local)
            found = self._answer(request, start)
            return found and self._native.shrink(start + found) - local
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
        if self._store is not None and not self._asked(waiting, now):
            return None
        keep = self._native.keep(waiting.tokens.count(), self._keep)
        match = self.manager.lookup(tokens, now=now, scope=waiting.scope, keep=keep)
        if match.tokens <= local:
            return 0
        first, count = local // self._size, match.tokens // self._size
        host = match.resident(HOST, skip=first)
        if self.proofs:
            host, waits = self.proofs.usable(match.blocks[first : first + host])
            if waits and self._may_await_proofs(waiting, now):
                return None
        if first + host < count:
            if self._await_deeper(waiting, match, first, host, now):
                return None
        elif not waiting.waits_until:
            waiting.from_disk = waiting.from_store = 0
        end = self._native.stretch(self._native.shrink(local + host * self._size))
        waiting.promise = Promise(local, end)
        return end - local

    def _await_deeper(
        self, waiting: WaitingRequest, match: Match, first: int, host: int, now: int
    ) -> bool:
        """Pin blocks in host memory, and have the next ones come; whether the request waits."""
        states = [self._state(block) for block in match.blocks[first:]]
        states = states[: self._usable(waiting, states, first)]
        if not waiting.waits_until:
            stored = [state == _STORED for state in states]
            waiting.from_store = self._native.counted(first, stored)
            rest = self._native.counted(first + host, [True] * (len(states) - host))
            waiting.from_disk = rest - waiting.from_store if _DEEPER in states else 0
        self._pin(waiting, match.handles[first:], host, now)
        near = sum(any(copy.tier <= HOST for copy in each.copies) for each in match.blocks)
        waiting.coming = _COMING in states
        if host >= len(states) or waiting.gave_up:
            return False
        tokens = waiting.tokens.read()[: (first + len(states)) * self._size]
        lacking = match.blocks[first + host]
        return self._may_wait(waiting, lacking, tokens, host=host, near=near, now=now)

    def _may_await_proofs(self, waiting: WaitingRequest, now: int) -> bool:
        """Whether a request waits for proofs of its blocks; no longer than the deadline."""
        waiting.proofs_until = waiting.proofs_until or now + self._deadline_ns
        return now < waiting.proofs_until

    def _usable(self, waiting: WaitingRequest, states: list[str], first: int) -> int:
        """Leading states that count: without an answer of the store, its blocks do not."""
        if waiting.sure is not None:
            for at, state in enumerate(states):
                if state == _STORED and first + at >= waiting.sure:
                    return at
        return len(states)

    def _asked(self, waiting: WaitingRequest, now: int) -> bool:
        """Ask the shared store for the blocks that no faster tier has; whether that is over."""
        if waiting.sure is None:
            self._ask(waiting, now)
        return waiting.sure is not None

    def _ask(self, waiting: WaitingRequest, now: int) -> None:
        question = waiting.question
        if question is None:
            tokens = waiting.tokens.read()
            keys = self.manager.keys(tokens, scope=waiting.scope)[: (len(tokens) - 1) // self._size]
            near = self._near(waiting, now)
            waiting.asked_at, waiting.sure = now, near
            if near >= len(keys):
                return
            waiting.question = self._store.ask(near, keys[near:], now) if self._store else None
            if waiting.question is None:
                self.counters.lost["store lookup: every thread hangs"] += 1
            else:
                waiting.sure = None
        elif question.found is not None or now >= question.deadline:
            waiting.question, waiting.sure = None, question.near
            if question.found is None or question.found.late:
                self.counters.lost["store lookup: no answer"] += 1
            if question.found is not None:
                self._take_in(waiting, question, now)

    def _near(self, waiting: WaitingRequest, now: int) -> int:
        """Leading blocks that a faster tier than the shared store has whole."""
        match = self.manager.lookup(waiting.tokens.read(), now=now, scope=waiting.scope, keep=1)
        count = 0
        while count < len(match.handles):
            step = max(match.resident(tier, skip=count) for tier in range(self._remote or 0))
            if not step:
                break
            count += step
        return count

    def _take_in(self, waiting: WaitingRequest, question: Question, now: int) -> None:
        """Mark the blocks that the shared store has, and clear the mark of those it has lost."""
        found, tier = question.found, self._remote
        if found is None or tier is None:
            return
        tokens, upto = waiting.tokens.read(), question.near + found.blocks
        mark = partial(self.manager.mark, now=now, scope=waiting.scope)
        if upto < question.near + len(question.keys) and not found.late:
            # A block to clear may be leased or on the move: then it stays, and its load fails.
            with suppress(ConfigError):
                mark(tokens, tier, present=False, skip=upto)
        if not found.blocks:
            return
        path = tokens[: upto * self._size]
        try:
            mark(path, tier, present=True, skip=question.near)
        except (ConfigError, NoSpaceError):
            # A local block left since the question, or leases fill the tier.
            self.counters.lost["store lookup: blocks could not be marked"] += 1
        else:
            waiting.sure = upto

    def _state(self, block: MatchedBlock) -> str:
        """Return the state of a matched block as seen from host memory."""
        for copy in block.copies:
            if copy.tier == HOST and not copy.leaving:
                whole = (copy.layer_lo, copy.layer_hi) == (0, self._layers)
                return _THERE if whole else _COMING
        if self._remote is None:
            return _DEEPER
        tiers = {copy.tier for copy in block.copies}
        return _STORED if self._remote in tiers <= {0, self._remote} else _DEEPER

    def _may_wait(
        self,
        waiting: WaitingRequest,
        lacking: MatchedBlock,
        tokens: NDArray[np.uint32],
        *,
        host: int,
        near: int,
        now: int,
    ) -> bool:
        """Prefetch deeper blocks into host memory; return whether the request waits for them.

        It waits no longer than the deadline, and not if nothing more can come. Once it does not
        wait any longer it is counted, and waits no more before its admission.

        Args:
            waiting: the request.
            lacking: its first block that is not in host memory.
            tokens: its tokens up to the last of these blocks.
            host: the number of its leading blocks in host memory.
            near: the number of its blocks there or above.
            now: the time.
        """
        if not self._deep and not waiting.coming:
            return False
        if not waiting.waits_until:
            waiting.waits_until = (waiting.asked_at or now) + self._deadline_ns
        if now >= waiting.waits_until:
            return self._gives_up(waiting, f"{self._source(lacking)} too slow")
        if waiting.coming:
            return True
        if host <= waiting.prefetched:  # asked before, and no further: there is no room
            return self._gives_up(waiting, "no room to bring up")
        prefetch = Prefetch(tokens=tokens, tier="host", scope=waiting.scope)
        (reply,) = self.manager.hint([prefetch], now=now)
        # Prefetch can be refused while loads of other requests fill the quota: retry then. A
        # request whose prefix did not grow after a granted prefetch gives up; otherwise requests
        # larger than host memory would evict each other's blocks forever.
        crowded = reply.code == "crowded" and reply.blocks <= near
        if not (crowded and self.manager.stats().moves):
            waiting.prefetched = host
        return True

    def _gives_up(self, waiting: WaitingRequest, cause: str) -> bool:
        """Count a request that waits no longer; False, which is the answer whether it waits."""
        self.counters.lost[cause] += 1
        waiting.gave_up = True
        return False

    def _source(self, block: MatchedBlock) -> str:
        """The name of what a block that is not in host memory comes from."""
        tiers = {copy.tier for copy in block.copies}
        if self._disk in tiers:
            return "disk"
        return "store" if self._remote in tiers else "copy to host memory"

    def _pin(
        self, waiting: WaitingRequest, handles: NDArray[np.uint64], host: int, now: int
    ) -> None:
        """Pin blocks in host memory until the rest arrives; without quota the request gives up."""
        if host > waiting.pinned and self._pinned + host - waiting.pinned <= self._most_pinned:
            new = handles[waiting.pinned : host]
            waiting.pins.append(self.manager.pin_copies(new, HOST, now=now))
            self._pinned += len(new)
            waiting.pinned = host
