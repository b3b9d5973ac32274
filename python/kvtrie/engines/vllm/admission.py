"""Admission: a request gets blocks of vLLM's, and a lease on what kvtrie has of it.

Invariant: slots that vLLM was promised are loaded, or reported as not loaded.
Cost: one lookup and one lease per admission.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtrie.engines.vllm.running import RunningRequest
from kvtrie.errors import KvtrieError

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kvtrie import Lease
    from kvtrie.engines.vllm.cache import ServedCache
    from kvtrie.engines.vllm.commits import Commits
    from kvtrie.engines.vllm.loads import Loads
    from kvtrie.engines.vllm.misses import Misses
    from kvtrie.engines.vllm.requests import Requests
    from kvtrie.engines.vllm.waiting import WaitingRequest

__all__ = ["Admission"]


class Admission:
    """Makes running requests."""

    def __init__(
        self,
        cache: ServedCache,
        requests: Requests,
        commits: Commits,
        loads: Loads,
        misses: Misses,
    ) -> None:
        self._cache, self._requests, self._commits = cache, requests, commits
        self._loads, self._misses = loads, misses

    def admit(self, request: Request, table: list[int], loaded: int) -> None:
        """Take note that vLLM has given blocks to a request.

        Args:
            request: the request.
            table: all of its blocks.
            loaded: tokens after vLLM's own hit that kvtrie loads.
        """
        cache, now = self._cache, self._cache.clock()
        waiting = self._requests.of(request)
        unsure = self._end_last_run(request, waiting)
        sequence, start = waiting.sequence, waiting.start
        local = sequence.tokens(start)
        end = sequence.at(local + loaded)
        self._misses.admitted(request, waiting, end, now)
        if waiting.scope is None or cache.resetting:
            return
        own, new = table[: local // cache.size], table[local // cache.size :]
        table = sequence.slots(table)
        promised = table[start // cache.size : end // cache.size]
        if not cache.identity.settled or cache.identity.reads_stale(request, own):
            self._requests.pins.end(waiting.pinned, now)
            self._loads.lose(promised, "blocks of other weights")
            return
        cache.identity.written(new)
        cache.counters.tokens["asked"] += sequence.known - local
        lease = self._acquire(waiting, end, now, promised)
        if lease is None:
            return
        run = RunningRequest(
            request,
            sequence,
            lease,
            list(table),
            cache.step,
            waiting.prompt,
            waiting.identity,
            lease.tokens + cache.size,
        )
        run.stopped = unsure
        self._requests.running[request.request_id] = run
        self._requests.pins.end(waiting.pinned, now)
        cache.use(lease)
        self._commits.learn(run, 0, only_missing=True)
        lease.bind(0, table)
        if loaded:
            self._load(run, start // cache.size, promised, now)
            host, disk, store = waiting.sources(loaded)
            cache.counters.tokens.update(host=host, disk=disk, remote=store)

    def _acquire(
        self, waiting: WaitingRequest, end: int, now: int, promised: list[int]
    ) -> Lease | None:
        """A lease whose match ends where the loads do; None, without promised slots, if refused."""
        tokens = waiting.sequence.read()
        try:
            return self._cache.manager.acquire(
                tokens,
                now=now,
                scope=waiting.scope,
                session=waiting.session,
                keep=len(tokens) - end,
                load="none",
            )
        except KvtrieError as error:
            self._loads.lose(promised, f"{type(error).__name__} at admission")
            self._requests.pins.end(waiting.pinned, now)
            return None

    def _load(self, run: RunningRequest, first: int, slots: list[int], now: int) -> None:
        """Load blocks from one on into slots."""
        cache, last, ids = self._cache, first + len(slots), list[int]()
        if run.lease.matched >= last * cache.size:
            try:
                ids = run.lease.load(blocks=(first, last), now=now).tolist()
            except KvtrieError as error:
                cache.counters.lost[f"{type(error).__name__} at load"] += 1
        if len(ids) != len(slots):
            self._loads.lose(slots, "a promise that did not hold")
            run.stopped = True
        self._loads.add(run, ids, slots)

    def _end_last_run(self, request: Request, waiting: WaitingRequest) -> bool:
        """End the run before this admission; whether rows that it left may be of other tokens."""
        last = self._requests.drop(request.request_id)
        waiting.look_up_again()
        if last is not None:
            last.written = last.committable()  # before vLLM counts what it schedules now
        if not (computed := waiting.sequence.computed()):
            return False
        waiting.start = computed  # a session's next input: vLLM asks for no match then
        # After a stop amid accepted drafts vLLM counts too many tokens as computed.
        return last is not None and (last.stopped or last.drafted)
