"""Schedule: holds a runner's waiting and running jobs and chooses the next job.

Jobs awaited by a lease start first. All other jobs respect the `io_budget` of both their tiers, and
their stores wait while an awaited load runs.
Invariant: a job is in the queue, running, or over.
Cost: a step per running job and choice.
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
        tiers: their `io_budget` limits jobs without a waiting lease.
        split: whether each storage has its own threads.
        limits: maximum bytes of writes in flight, by storage.

    Attributes:
        queue: jobs not yet started.
        running: started and unended jobs, including late jobs.
        budget: the limits for jobs without a waiting lease.
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
        """Start the next job, or several jobs for a single call of their storage.

        Args:
            worker: the thread for the jobs.
            limit: maximum number of jobs.
            now: the time.
            storage: the storage of the thread, or None for a thread of copies between pools.
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
            if joining is None and not job.batchable:  # joining jobs are batchable
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
        # Copies in both directions slow each other down: an awaited load runs alone.
        if job.store and self.loading(job.storage):
            return False
        return self.budget.free_at(job) <= now

    def loading(self, storage: int | None = None) -> bool:
        """Return whether an awaited load runs, on a given storage if each has its own threads."""
        return any(
            job.urgency == Urgency.DEMAND
            and not job.store
            and job.state is JobState.COPYING
            and (not self._split or job.storage == storage)
            for job in self.running
        )

    def writing(self, storage: int) -> int:
        """Return the bytes of writes to a storage in flight, including late writes."""
        return sum(job.bytes for job in self.running if job.store and job.tiers[1] == storage)

    def left(self) -> int:
        """Return the number of unended moves."""
        return len(self.queue) + sum(len(job.ids) for job in self.running)

    def late(self) -> int:
        """Return the number of moves still running after being reported failed."""
        return sum(len(job.ids) for job in self.running if job.state is JobState.LATE)

    def unended(self, ids: set[int]) -> set[int]:
        """Return the unended moves among `ids`."""
        left = {ident for ident in ids if self.queue.job_of(ident)}
        return left.union(*(ids.intersection(job.ids.tolist()) for job in self.running))

    def patience(self, deadline_ns: int | None, now: int) -> float | None:
        """Return the seconds until a deadline passes or a budget frees a job; None if never."""
        # A waiting job may start at once without setting a timer, so its deadline counts from now.
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
