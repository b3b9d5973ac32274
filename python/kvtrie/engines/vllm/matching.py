"""Matching: counts the tokens of waiting requests in host memory, for vLLM's scheduler.

A shared store is queried once for the blocks missing on all faster tiers. Its blocks are marked and
then loaded like blocks on disk.
Invariant: an answer counts only blocks complete and verified in host memory. A request waits for a
store's answer and for prefetched blocks at most until the deadline.
Cost: a lookup per call after a change in the manager, else a comparison of numbers.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING

from kvtrie.engines.vllm.cache import HOST
from kvtrie.engines.vllm.waiting import Answer, Wait
from kvtrie.errors import ConfigError
from kvtrie.printable import MESSAGE, printable
from kvtrie.settings.hint import Prefetch
from kvtrie.transfer.prefetch import Prefetcher

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kvtrie import Match, MatchedBlock
    from kvtrie.engines.vllm.cache import ServedCache
    from kvtrie.engines.vllm.requests import Requests
    from kvtrie.engines.vllm.settings import Settings
    from kvtrie.engines.vllm.waiting import WaitingRequest

__all__ = ["Matching"]

_LOG = logging.getLogger("vllm.kvtrie")  # below vLLM's logger, for its handlers
_NS = 1_000_000_000
_RESIDENT, _IN_FLIGHT, _LOWER_TIER, _STORED = "resident", "in flight", "lower tier", "stored"


class Matching:
    """Matches waiting requests with host memory."""

    def __init__(self, cache: ServedCache, requests: Requests, settings: Settings) -> None:
        self._cache, self._requests = cache, requests
        self._keep = max(1, settings.native_last)  # trailing prompt tokens, always computed
        self._deadline_ns = int(settings.deadline_s * _NS)
        self._lookup_ns = int(settings.lookup_s * _NS)
        self._disk, self._remote = cache.disk, cache.remote
        self._prefetcher: Prefetcher | None = None
        if cache.store is not None:
            store = cache.store
            self._prefetcher = Prefetcher(cache.manager, store.find, cache.clock, store.answers)

    def match(self, request: Request, local: int) -> int | None:
        """Return the tokens in host memory after vLLM's own hit, or None to retry next step.

        Args:
            request: a waiting request.
            local: tokens of vLLM's own hit, whole blocks.
        """
        self._cache.identity.awaited = True
        if self._cache.identity.awaits(request):
            return None
        waiting = self._requests.of(request)
        end = self._answer(waiting, waiting.sequence.at(local), self._cache.clock())
        return None if end is None else waiting.sequence.tokens(end) - local

    def _answer(self, waiting: WaitingRequest, start: int, now: int) -> int | None:
        """Return the position after the last block in host memory, or None while waiting."""
        cache, waiting.start = self._cache, start
        if waiting.scope is not None and not cache.identity.known:
            return None
        if cache.resetting:
            return start
        generation = cache.manager.generation
        if (answer := waiting.valid_answer(generation, start, now)) is not None:
            return answer.end
        self._requests.spend(waiting)
        end = self._match(waiting, start, now)
        # A prefetch issued in this call may be rejected, so this answer is not cached.
        sure = end is not None or waiting.wait.coming
        about = generation, waiting.sequence.known, start
        waiting.answer = Answer(*about, end) if sure else None
        return end

    def _match(self, waiting: WaitingRequest, start: int, now: int) -> int | None:
        cache, waiting.wait.coming = self._cache, False
        if waiting.scope is None:
            return start
        if self._prefetcher is not None and not self._asked(self._prefetcher, waiting, now):
            return None
        found = self._found(waiting, start, now)
        if found is None:
            return None
        match, host = found
        first, count = start // cache.size, match.tokens // cache.size
        if first + host < count:
            if self._await_deeper(waiting, match, first, host, now):
                return None
        elif not waiting.wait.until:
            waiting.from_disk = waiting.from_store = 0
        return start + host * cache.size

    def _found(self, waiting: WaitingRequest, start: int, now: int) -> tuple[Match, int] | None:
        """Return a request's match and its number of verified blocks in host memory after `start`.

        Returns None while further blocks are being verified.
        """
        cache, tokens = self._cache, waiting.sequence.read()
        keep, first = waiting.sequence.last(self._keep), start // cache.size

        def lookup(keep: int) -> tuple[Match, int]:
            match = cache.manager.lookup(tokens, now=now, scope=waiting.scope, keep=keep)
            return match, match.resumable(HOST, skip=first) if match.tokens > start else 0

        match, host = lookup(keep)
        if not cache.unverified:
            return match, host
        verified, waits = cache.unverified.usable(match.blocks[first : first + host])
        if waits and self._may_await_verification(waiting, now):
            return None
        if verified == host or len(cache.groups) == 1:
            return match, verified
        if self._clear_damaged(match, now):
            return self._found(waiting, start, now)
        # Match up to an earlier border of all groups.
        return lookup(max(keep, len(tokens) - (first + verified) * cache.size))

    def _clear_damaged(self, match: Match, now: int) -> bool:
        """Clear damaged windows and states of a match. Return whether any was cleared."""
        cleared = 0
        for handle, group in self._cache.unverified.damaged_parts(match.blocks):
            with suppress(ConfigError):  # a lease holds it
                clear = self._cache.manager.clear_copies
                cleared += len(clear([handle], HOST, group=group, now=now))
        return cleared > 0

    def _may_await_verification(self, waiting: WaitingRequest, now: int) -> bool:
        """Return whether a request may wait for verification, at most until the deadline."""
        waiting.verification_until = waiting.verification_until or now + self._deadline_ns
        return now < waiting.verification_until

    def _await_deeper(
        self, waiting: WaitingRequest, match: Match, first: int, host: int, now: int
    ) -> bool:
        """Pin blocks in host memory and prefetch the next blocks. Return whether to wait.

        A request waits at most until the deadline, and only if more blocks can arrive. When it
        gives up it is counted, and does not wait again before its admission.
        """
        states = [self._state(block) for block in match.blocks[first:]]
        states = states[: self._usable(waiting, states, first)]
        wait = waiting.wait
        if not wait.until:
            sources = [each if each == _STORED else _LOWER_TIER for each in states[host:]]
            tokens = waiting.sequence.tokens_by_source(first, [_RESIDENT] * host + sources)
            waiting.from_store = tokens[_STORED]
            waiting.from_disk = tokens[_LOWER_TIER] if _LOWER_TIER in states else 0
        local_blocks = host
        if len(self._cache.groups) > 1:
            # Windows and states arrive after all blocks of the first group.
            lacking = (at for at, each in enumerate(states) if each != _RESIDENT)
            local_blocks = next(lacking, len(states))
        self._requests.pins.extend(waiting.pinned, match.handles[first : first + local_blocks], now)
        wait.coming = _IN_FLIGHT in states
        if host >= len(states) or wait.gave_up or not (self._disk or self._remote or wait.coming):
            return False
        if not wait.until:
            wait.until = (waiting.store.asked_at or now) + self._deadline_ns
        first_missing = match.blocks[first + min(local_blocks, len(states) - 1)]
        if now >= wait.until:
            return self._gives_up(wait, f"{self._source(first_missing)} too slow")
        if wait.coming:
            return True
        if local_blocks <= wait.prefetched:  # no progress since the last prefetch: no room
            return self._gives_up(wait, "no room to bring up")
        self._prefetch(waiting, match, first + len(states), local_blocks, now)
        return True

    def _prefetch(
        self, waiting: WaitingRequest, match: Match, blocks: int, host: int, now: int
    ) -> None:
        """Prefetch leading blocks of a match, with `host` blocks already in host memory."""
        cache = self._cache
        tokens = waiting.sequence.read()[: blocks * cache.size]
        prefetch = Prefetch(tokens=tokens, tier="host", scope=waiting.scope)
        (reply,) = cache.manager.hint([prefetch], now=now)
        local_blocks = sum(any(copy.tier <= HOST for copy in each.copies) for each in match.blocks)
        # Prefetch can be refused while concurrent loads fill the quota: retry then. A request
        # gives up if its prefix does not grow after a granted prefetch. Otherwise requests larger
        # than host memory would evict each other's blocks forever.
        crowded = reply.code == "crowded" and reply.blocks <= local_blocks
        if not (crowded and cache.manager.stats().moves):
            waiting.wait.prefetched = host

    def _gives_up(self, wait: Wait, cause: str) -> bool:
        """Count a request as giving up, and return False: it does not wait."""
        self._cache.counters.lost[cause] += 1
        wait.gave_up = True
        return False

    def _source(self, block: MatchedBlock) -> str:
        """Return the name of the source of a block missing in host memory."""
        tiers = {copy.tier for copy in block.copies}
        if self._disk in tiers:
            return "disk"
        return "store" if self._remote in tiers else "copy to host memory"

    def _state(self, block: MatchedBlock) -> str:
        """Return the state of a matched block as seen from host memory."""
        held = [copy for copy in block.copies if copy.tier == HOST and not copy.leaving]
        if any((copy.layer_lo, copy.layer_hi) != (copy.coming_lo, copy.coming_hi) for copy in held):
            return _IN_FLIGHT
        if held and held[0].group == 0:
            whole = (held[0].layer_lo, held[0].layer_hi) == (0, self._cache.layers)
            return _RESIDENT if whole else _IN_FLIGHT
        if self._remote is None:
            return _LOWER_TIER
        tiers = {copy.tier for copy in block.copies if copy.group == 0}
        return _STORED if self._remote in tiers <= {0, self._remote} else _LOWER_TIER

    def _usable(self, waiting: WaitingRequest, states: list[str], first: int) -> int:
        """Return the number of usable leading states: the store's blocks only up to its answer."""
        if (sure := waiting.store.sure) is not None:
            for at, state in enumerate(states):
                if state == _STORED and first + at >= sure:
                    return at
        return len(states)

    def _asked(self, prefetcher: Prefetcher, waiting: WaitingRequest, now: int) -> bool:
        """Ask the shared store for blocks missing on faster tiers. Return whether it is done."""
        lookup, lost = waiting.store, self._cache.counters.lost
        if lookup.sure is not None:
            return True
        question = lookup.question
        if question is None:
            tokens, until = waiting.sequence.read(), now + self._lookup_ns
            question = prefetcher.ask(tokens, waiting.scope, until, keep=1)
            lookup.asked_at, lookup.question = now, question
            if not question.closed:
                return False
        elif question.found is None and now < question.deadline:
            return False
        if question.error is not None:
            why = printable(question.error, MESSAGE, in_ascii=True)
            _LOG.warning("kvtrie: a question to the shared store failed: %s", why)
        found = question.found
        lookup.question, lookup.sure = None, prefetcher.take_in(question)
        if question.refused:
            lost["store lookup: every thread hangs"] += 1
        elif found is None or found.late:
            lost["store lookup: no answer"] += 1
        if found is not None and found.blocks and lookup.sure == question.local_blocks:
            lost["store lookup: blocks could not be marked"] += 1
        return True

    def close(self) -> None:
        """End the threads for queries to a shared store."""
        if self._prefetcher is not None:
            self._prefetcher.close()
