"""Commits: reports the blocks filled by running requests to the manager.

Invariant: a block is committed only after every rank has finished the step filling it, and while
the request owns its slot. Cost: a comparison per running request and step, and a commit per
request with full blocks.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from kvtrie import Moves
    from kvtrie.engines.vllm.cache import ServedCache
    from kvtrie.engines.vllm.requests import Requests
    from kvtrie.engines.vllm.running import RunningRequest

__all__ = ["Commits"]


@dataclass(slots=True)
class _Planned:
    """A step in flight and its requests with blocks to fill."""

    step: int
    rows: list[tuple[RunningRequest, int]]


class Commits:
    """The uncommitted blocks of running requests.

    Attributes:
        taken_back: whether stores may still read blocks taken back by vLLM since the last orders.
    """

    def __init__(self, cache: ServedCache, requests: Requests) -> None:
        self._cache, self._requests = cache, requests
        self._planned: deque[_Planned] = deque()
        self._due: dict[RunningRequest, None] = {}  # with full blocks, oldest first
        self._new: set[int] = set()  # blocks committed for the next orders
        self._stored = 0  # blocks of `_new` stored during the step filling them
        self._finished = -1  # the last step finished by every rank
        self._seen = -1  # the last step with its blocks committed
        self.taken_back = False

    def plan(self, rows: list[tuple[RunningRequest, int]]) -> None:
        """Record how far the next step fills the blocks of requests."""
        if rows:
            self._planned.append(_Planned(self._cache.step, rows))

    def finished(self, step: int) -> None:
        """Make the blocks filled by steps up to `step` due for a commit."""
        self._finished = max(self._finished, step)
        while self._planned and self._planned[0].step <= step:
            for run, upto in self._planned.popleft().rows:
                run.written = max(run.written, upto)
                if not run.stopped:
                    self._due[run] = None

    def commit_due(self, now: int) -> None:
        """Commit the full blocks of running requests."""
        for run in list(self._due):
            with self._requests.contained(run.request.request_id):
                self._commit(run, now)
        self._seen = self._finished

    def release_leaving(self, now: int) -> list[int]:
        """End the leases of leaving runs. Return the moves still using their slots."""
        released: list[int] = []
        for run in self._requests.leaving:
            with self._cache.boundary.contained(run.request.request_id):
                self._commit(run, now)
            self._due.pop(run, None)
            run.stopped = True
            self._cache.use(run.lease)
            released += run.lease.release(now=now).tolist()
            run.end_slots()
        self._requests.leaving = []
        self.taken_back |= bool(released)
        return released

    def _commit(self, run: RunningRequest, now: int) -> None:
        """Commit the full blocks written by finished steps. Later blocks stay due."""
        cache, size = self._cache, self._cache.size
        states, run.states = run.states, [one for one in run.states if one[0] > self._finished]
        if not cache.identity.known_for(run.request):
            return
        run.stopped |= run.identity != cache.identity.name(run.request)
        upto = min(run.committable(), len(run.table) * size) // size * size
        if run.stopped:
            self._due.pop(run, None)
        if run.stopped or upto < run.full or not run.lease.ready():
            return
        begin = run.lease.tokens
        for step, group, place, slot in states:
            # vLLM frees the block after the next step.
            if self._seen < step <= self._finished and begin <= place * size < upto:
                run.lease.bind(place, [slot], group)
        run.unbind_multi_slot_pages(begin // size)
        new = run.sequence.read()[begin:upto]
        committed = run.lease.commit(np.ascontiguousarray(new), now=now)
        self.learn(run, begin // size)
        if run.shares:  # record its tenant on tiers kept for the next server
            cache.use(run.lease)
        self._new.update(committed.new.tolist())
        self._stored += committed.ahead
        written = run.sequence.tokens(upto) - run.sequence.tokens(begin)
        cache.counters.blocks["written"] += written // size
        run.full = upto + size
        if run.written < run.full:
            self._due.pop(run, None)

    def learn(self, run: RunningRequest, first: int, *, only_missing: bool = False) -> None:
        """Record vLLM's hashes of a run's blocks from index `first` on, for events."""
        published = self._cache.published
        # vLLM's hashes of a shared block and of its parent differ by tenant.
        if published is None or run.shares:
            return
        if published.nameless or not only_missing:
            handles = run.lease.handles[first:].tolist()
            weights = self._cache.identity.weights
            published.learn(run.request, handles, first, self._cache.size, weights=weights)

    def count_unstored(self, parts: list[Moves]) -> None:
        """Count the newly committed blocks without a store to host memory.

        Args:
            parts: the moves of these orders.
        """
        if not self._new:
            return
        under_way = (*parts, *self._cache.moves.dispatch.waiting())
        stores = (moves.block[moves.src == 0].tolist() for moves in under_way)
        left = len(self._new.difference(*stores)) - self._stored
        if left > 0:
            self._cache.counters.lost["no room on host"] += left
        self._new, self._stored = set(), 0

    def clear(self) -> None:
        """Forget the blocks of steps in flight."""
        self._planned.clear()
        self._new, self._stored = set(), 0
