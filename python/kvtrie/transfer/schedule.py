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
    from collections.abc import Sequence

    from kvtrie.tier import Tier
    from kvtrie.transfer.job import Job

__all__ = ["Schedule"]

_NS = 1_000_000_000


class Schedule:
    """Waiting and running jobs. It has no lock: its runner's section guards it.

    Args:
        tiers: their `io_budget` limits jobs that no lease awaits.

    Attributes:
        queue: jobs that have not started.
        running: jobs that have started and not ended, those past their deadline included.
        budget: what jobs may take that no lease awaits.
    """

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self.queue = Queue()
        self.running: list[Job] = []
        self.budget = Budget(tiers)

    def next(self, worker: threading.Thread, limit: int, now: int) -> list[Job]:
        """Start the next job, or several that go in one call of their storage.

        Args:
            worker: the thread that will run them.
            limit: the most jobs.
            now: the time.
        """
        jobs: list[Job] = []
        while len(jobs) < limit:
            job = self.queue.pop(lambda one: self._may(one, now), jobs[0] if jobs else None)
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
        if job.urgency == Urgency.DEMAND:
            return True
        # Both directions at once slow each other down: an awaited load goes alone.
        if job.store and self.loading():
            return False
        return self.budget.free_at(job) <= now

    def loading(self) -> bool:
        """Return whether a load runs that a lease awaits."""
        return any(
            job.urgency == Urgency.DEMAND and not job.store and job.state is JobState.COPYING
            for job in self.running
        )

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
