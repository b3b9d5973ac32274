"""Schedule: the jobs of a runner that wait and that run, and the choice of which start next.

Jobs that a lease awaits start first. Any other keeps to the `io_budget` of both its tiers, and a
store among those waits while an awaited load runs.
Invariant: a job is in the queue, running, or over. Cost: a step per running job and choice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtrie.transfer.budget import Budget
from kvtrie.transfer.job import Urgency
from kvtrie.transfer.job_state import JobState
from kvtrie.transfer.queue import Queue

if TYPE_CHECKING:
    import threading
    from collections.abc import Mapping, Sequence

    from kvtrie.settings.tier import Tier
    from kvtrie.transfer.job import Job

__all__ = ["Schedule"]

_NS = 1_000_000_000


class Schedule:
    """Waiting and running jobs. It has no lock: its runner's section guards it.

    Args:
        tiers: their `io_budget` limits jobs that no lease awaits.
        split: whether each storage has its own threads.
        limits: bytes of writes that may be in flight, by storage.

    Attributes:
        queue: jobs that have not started.
        running: jobs that have started and not ended, those past their deadline included.
        budget: what jobs may take that no lease awaits.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        *,
        split: bool = False,
        limits: Mapping[int, int] | None = None,
    ) -> None:
        self.queue = Queue(split=split)
        self._split = split
        self._limits = dict(limits or {})
        self.running: list[Job] = []
        self.budget = Budget(tiers)

    def next(
        self, worker: threading.Thread, limit: int, now: int, storage: int | None = None
    ) -> list[Job]:
        """Start the next job, or several that go in one call of their storage.

        Args:
            worker: the thread that will run them.
            limit: the most jobs.
            now: the time.
            storage: the storage whose thread it is; None for a thread that copies between pools.
        """
        jobs: list[Job] = []
        while len(jobs) < limit:
            joining = jobs[0] if jobs else None
            job = self.queue.pop(lambda one: self._may(one, now), joining, storage)
            if job is None:
                break
            jobs.append(job)
            job.go(JobState.COPYING)
            job.started_ns = now
            job.worker = worker
            self.running.append(job)
            if job.urgency != Urgency.DEMAND:
                self.budget.spend(job, now)
            if not job.batchable:
                break
        return jobs

    def _may(self, job: Job, now: int) -> bool:
        limit = self._limits.get(job.tiers[1]) if job.store else None
        if limit is not None:
            busy = self.writing(job.tiers[1])
            if busy and busy + job.bytes > limit:
                return False
        if job.urgency == Urgency.DEMAND:
            return True
        # Both directions at once slow each other down: an awaited load goes alone.
        if job.store and self.loading(job.storage):
            return False
        return self.budget.free_at(job) <= now

    def loading(self, storage: int | None = None) -> bool:
        """Return whether a load runs that a lease awaits; of one storage, if each has threads."""
        return any(
            job.urgency == Urgency.DEMAND
            and not job.store
            and job.state is JobState.COPYING
            and (not self._split or job.storage == storage)
            for job in self.running
        )

    def writing(self, storage: int) -> int:
        """Bytes of writes to a storage in flight, those past their deadline included."""
        return sum(job.bytes for job in self.running if job.store and job.tiers[1] == storage)

    def left(self) -> int:
        """Moves that have not ended."""
        return len(self.queue) + sum(len(job.ids) for job in self.running)

    def late(self) -> int:
        """Moves that still run though they were reported failed."""
        return sum(len(job.ids) for job in self.running if job.state is JobState.LATE)

    def unended(self, ids: set[int]) -> set[int]:
        """Those of some moves that have not ended."""
        left = {ident for ident in ids if self.queue.job_of(ident)}
        return left.union(*(ids.intersection(job.ids.tolist()) for job in self.running))

    def patience(self, deadline_ns: int | None, now: int) -> float | None:
        """Seconds until a deadline passes or a budget lets a job start; None for neither."""
        # A waiting job may start at once, and starts no timer by itself: it counts from now.
        starts = [
            job.started_ns if job.state is JobState.COPYING else now
            for job in self.running
            if job.state is not JobState.LATE
        ]
        starts += [now] if self.queue else []
        free = [self.budget.free_at(job) for job in self.queue] if self.budget.limited else []
        times = [time for time in free if time > now]
        if deadline_ns is not None and starts:
            times.append(min(starts) + deadline_ns)
        return max(0.0, (min(times) - now) / _NS) if times else None
