"""Admission: a request gets blocks of vLLM's memory, and a lease on its cached blocks.

Invariant: slots promised to vLLM are loaded, or reported as not loaded.
Cost: a lookup and a lease per admission.
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
    """Creates running requests."""

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

    def admit(self, request: Request, tables: list[list[int]], loaded: int) -> None:
        """Record the blocks allocated to a request, and start its loads.

        With several groups, vLLM computes nothing of the request before its blocks are loaded, and
        calls this again after the loads.

        Args:
            request: the request.
            tables: all of its blocks, by group.
            loaded: tokens for kvtrie to load, after vLLM's own hit.
        """
        cache, now = self._cache, self._cache.clock()
        waiting = self._requests.of(request)
        run = self._requests.running.get(request.request_id)
        if run is not None and run.receiving and waiting.sequence.computed() and not loaded:
            self._go_on(run, tables)
            return
        self._requests.spend(waiting)
        unsure = self._end_last_run(request, waiting)
        sequence, start = waiting.sequence, waiting.start
        local = sequence.tokens(start)
        end = sequence.at(local + loaded)
        self._misses.admitted(request, waiting, end, now)
        if waiting.scope is None or cache.resetting:
            return
        first, last = start // cache.size, end // cache.size
        had = local // cache.size
        each = [*zip(tables, (had * group.pages for group in cache.groups), strict=True)]
        own = [slot for table, upto in each for slot in table[:upto] if slot]
        new = [slot for table, upto in each for slot in table[upto:] if slot]
        # A slot of several vLLM blocks is present if its last block is.
        ends = [
            table[group.pages - 1 :: group.pages]
            for group, table in zip(cache.groups, tables, strict=True)
        ]
        ends[0] = sequence.slots(ends[0])
        promised = [slot for table in ends for slot in table[first:last] if slot]
        if not cache.identity.known or cache.identity.reads_stale(request, own):
            self._requests.pins.end(waiting.pinned, now)
            self._loads.fail(request.request_id, promised, "blocks of other weights")
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
            cache.slots,
            [[] for _ in tables],
            [[] for _ in tables],
            cache.step,
            waiting.prompt,
            waiting.identity,
            lease.tokens + cache.size,
        )
        if waiting.first_identity is None:
            waiting.first_identity = waiting.identity
        run.stopped = unsure or waiting.first_identity != waiting.identity
        run.shares = waiting.scope.share_after is not None
        run.receiving = bool(loaded) and len(tables) > 1
        self._requests.running[request.request_id] = run
        self._requests.pins.end(waiting.pinned, now)
        cache.use(lease)
        self._commits.learn(run, 0, only_missing=True)
        for group, table in enumerate(tables):
            if not cache.groups[group].state:
                run.grow(group, table, range(first, last))
            elif loaded:  # only the state at the end of the loads is at a border
                run.grow(group, [0] * (last - 1) + ends[group][last - 1 : last])
        if loaded:
            self._load(run, first, last, promised, now)
            host, disk, store = waiting.sources(loaded)
            cache.counters.tokens.update(host=host, disk=disk, remote=store)

    def _go_on(self, run: RunningRequest, tables: list[list[int]]) -> None:
        """Bind the new slots of a request after its loads."""
        run.receiving, run.admitted_step = False, self._cache.step
        for group, table in enumerate(tables):
            if not self._cache.groups[group].state:
                new = table[run.had(group) :]
                run.grow(group, new)
                self._cache.identity.written(new)

    def _acquire(
        self, waiting: WaitingRequest, end: int, now: int, promised: list[int]
    ) -> Lease | None:
        """Acquire a lease up to the end of the loads, or fail the slots and return None."""
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
            request_id = waiting.sequence.request_id
            self._loads.fail(request_id, promised, f"{type(error).__name__} at admission")
            self._requests.pins.end(waiting.pinned, now)
            return None

    def _load(self, run: RunningRequest, first: int, last: int, slots: list[int], now: int) -> None:
        """Load the blocks of a range into slots of all groups."""
        cache, ids = self._cache, list[int]()
        if run.lease.matched >= last * cache.size:
            try:
                ids = run.lease.load(blocks=(first, last), now=now).tolist()
            except KvtrieError as error:
                cache.counters.lost[f"{type(error).__name__} at load"] += 1
        if len(ids) != len(slots):
            self._loads.fail(run.request.request_id, slots, "a promise that did not hold")
            run.stopped = True
        else:
            for group, table in zip(cache.groups, run.tables, strict=True):
                loaded = table[first:last]
                cache.counters.loaded[group.number] += len(loaded) - loaded.count(0)
        self._loads.add(run, ids, slots)

    def _end_last_run(self, request: Request, waiting: WaitingRequest) -> bool:
        """End the previous run, and return whether its rows may be of rejected tokens."""
        last = self._requests.drop(request.request_id)
        waiting.look_up_again()
        if last is not None:
            last.written = last.committable()  # before vLLM counts the tokens scheduled now
        if not (computed := waiting.sequence.computed()):
            return False
        waiting.start = computed  # a session's next input: vLLM asks for no match then
        # vLLM counts too many tokens as computed if it stopped at an accepted draft token.
        return last is not None and (last.stopped or last.drafted)
