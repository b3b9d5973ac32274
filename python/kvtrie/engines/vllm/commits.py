"""Commits: blocks that running requests fill, from the step that fills them to the manager.

Invariant: a block is committed only after every rank has finished the step that fills it, and while
the request has its slot. Cost: a comparison per running request and step, and a commit for each
that has filled blocks.
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
    """A step in flight and the requests whose blocks it fills."""

    step: int
    rows: list[tuple[RunningRequest, int]]


class Commits:
    """The blocks of running requests that are not committed yet.

    Attributes:
        taken_back: whether stores may still read blocks that vLLM has taken back since the last
            orders.
    """

    def __init__(self, cache: ServedCache, requests: Requests) -> None:
        self._cache, self._requests = cache, requests
        self._planned: deque[_Planned] = deque()
        self._due: dict[RunningRequest, None] = {}  # that have full blocks, oldest first
        self._new: set[int] = set()  # blocks that were committed for the next orders
        self._stored = 0  # of those, with the step that filled them
        self._finished = -1  # the last step that every rank has finished
        self._seen = -1  # the last one of which blocks were committed
        self.taken_back = False

    def plan(self, rows: list[tuple[RunningRequest, int]]) -> None:
        """Note the positions up to which the next step will have filled blocks of requests."""
        if rows:
            self._planned.append(_Planned(self._cache.step, rows))

    def finished(self, step: int) -> None:
        """Blocks that steps up to one have filled are due."""
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

    def let_go(self, now: int) -> list[int]:
        """End the leases of runs that left; the moves that still use their slots."""
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
        """Commit the full blocks that finished steps have written; the rest stays due."""
        cache, size = self._cache, self._cache.size
        states, run.states = run.states, [one for one in run.states if one[0] > self._finished]
        if not cache.identity.settled_for(run.request):
            return
        run.stopped |= run.identity != cache.identity.name(run.request)
        upto = min(run.committable(), len(run.table) * size) // size * size
        if run.stopped:
            self._due.pop(run, None)
        if run.stopped or upto < run.full or not run.lease.ready():
            return
        begin = run.lease.tokens
        for step, group, place, slot in states:
            # vLLM gives the block away after the next step.
            if self._seen < step <= self._finished and begin <= place * size < upto:
                run.lease.bind(place, [slot], group)
        run.forget_parted(begin // size)
        new = run.sequence.read()[begin:upto]
        committed = run.lease.commit(np.ascontiguousarray(new), now=now)
        self.learn(run, begin // size)
        if run.shares:  # tiers that the next server finds are to name its tenant too
            cache.use(run.lease)
        self._new.update(committed.new.tolist())
        self._stored += committed.ahead
        written = run.sequence.tokens(upto) - run.sequence.tokens(begin)
        cache.counters.blocks["written"] += written // size
        run.full = upto + size
        if run.written < run.full:
            self._due.pop(run, None)

    def learn(self, run: RunningRequest, first: int, *, only_missing: bool = False) -> None:
        """Note vLLM's hashes of a run's blocks, from one on, for events."""
        published = self._cache.published
        # vLLM's hashes of a block that tenants share differ by tenant, as those of its parent do.
        if published is None or run.shares:
            return
        if published.nameless or not only_missing:
            handles = run.lease.handles[first:].tolist()
            weights = self._cache.identity.weights
            published.learn(run.request, handles, first, self._cache.size, weights=weights)

    def count_unstored(self, parts: list[Moves]) -> None:
        """Count the blocks committed for the next orders that no store takes to host memory.

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
