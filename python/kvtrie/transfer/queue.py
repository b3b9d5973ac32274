"""Queue: waiting jobs in start order.

Jobs awaited by a lease come before prefetches, and both before background stores.
Priority inheritance: a job and its dependencies get the urgency of the waiting job.
Each storage may have a separate order. Jobs at the same storage slot run one after another, in the
order of arrival. Claimed loads also wait here for their turn, but their engine takes them by name.
Invariant: a job leaves the queue once: to run, cancelled, or after its `after` has failed.
Cost: constant per job and step, except for cancelling, which visits every job.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from kvtrie.transfer.job import Urgency
from kvtrie.transfer.job_state import JobState

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    import numpy as np
    from numpy.typing import NDArray

    from kvtrie.transfer.job import Job, Place

__all__ = ["Queue"]


class Queue:
    """Jobs by urgency, and jobs waiting for a move.

    The queue has no lock. Its owner locks it.

    Args:
        split: whether jobs of each storage have a separate order, so that other jobs never wait
            for them.
    """

    def __init__(self, *, split: bool = False) -> None:
        self._split = split
        # By storage and urgency, in the order of becoming startable.
        self._ready: dict[int | None, dict[Urgency, OrderedDict[Job, None]]] = {}
        self._claimed: OrderedDict[Job, None] = (
            OrderedDict()
        )  # startable jobs of the claiming engines
        self._waiting: dict[int, list[Job]] = {}
        # By place, in order: the first job runs or is ready, the rest wait for its end.
        self._lines: dict[Place, list[Job]] = {}
        # The job of each move, filled at the first lookup: most jobs run without a lookup.
        self._of: dict[int, Job] = {}
        self._new: dict[Job, None] = {}
        self._moves = 0

    def __len__(self) -> int:
        """The number of waiting moves."""
        return self._moves

    def add(self, job: Job) -> None:
        """Add a job. A job with an `after` waits until `ended` reports that move."""
        self._new[job] = None
        self._moves += len(job.ids)
        if job.after:
            self._waiting.setdefault(job.after, []).append(job)
            self._hurry(job.after, job.urgency)
        else:
            self._offer(job)

    def pop(
        self,
        may: Callable[[Job], bool] | None = None,
        joining: Job | None = None,
        storage: int | None = None,
    ) -> Job | None:
        """Remove and return the next job to start.

        Args:
            may: whether a job may start now, or None to allow all.
            joining: return the next job only if it joins this job, otherwise leave it queued.
            storage: the storage of the job, or None between pools. Ignored without `split`.
        """
        for jobs in self._ready.get(storage if self._split else None, {}).values():
            for job in jobs:
                if may is None or may(job):
                    if joining is not None and not job.joins(joining):
                        return None
                    self._leave(job)
                    return job
        return None

    def free(self, job: Job) -> bool:
        """Return whether a claimed job may start."""
        return job in self._claimed

    def take(self, job: Job) -> None:
        """Remove a startable claimed job."""
        self._leave(job)

    def hand_over(self, job: Job) -> None:
        """Hand a claimed job to the threads."""
        free = job in self._claimed
        if free:
            del self._claimed[job]
        job.lease = 0
        if free:
            self._ready_with(job)[job] = None

    def job_of(self, ident: int) -> Job | None:
        """Return the waiting job of a move."""
        return self._jobs().get(ident)

    def _jobs(self) -> dict[int, Job]:
        """Return the job of each move."""
        for job in self._new:
            self._of.update(dict.fromkeys(job.ids.tolist(), job))
        self._new.clear()
        return self._of

    def _forget(self, job: Job) -> None:
        """Remove a job's moves from the count and the index."""
        self._moves -= len(job.ids)
        if job in self._new:
            del self._new[job]
            return
        for ident in job.ids.tolist():
            del self._of[ident]

    def _leave(self, job: Job) -> None:
        del self._of_state(job)[job]
        self._forget(job)

    def _of_state(self, job: Job) -> OrderedDict[Job, None]:
        """Return the ordered set for a job while it may start."""
        return self._claimed if job.lease else self._ready_with(job)

    def _ready_with(self, job: Job) -> OrderedDict[Job, None]:
        """Return the ready jobs with a job's storage and urgency."""
        storage = job.storage if self._split else None
        if storage not in self._ready:
            self._ready[storage] = {urgency: OrderedDict() for urgency in Urgency}
        return self._ready[storage][job.urgency]

    def ready(self, storage: int | None) -> int:
        """Return the number of startable jobs of a storage, or of all jobs without `split`."""
        return sum(map(len, self._ready.get(storage if self._split else None, {}).values()))

    def of_storage(self, storage: int | None) -> list[Job]:
        """Return all jobs of a storage, including dependent jobs, or all jobs without `split`."""
        jobs = dict.fromkeys(self._jobs().values())
        return [job for job in jobs if not self._split or job.storage == storage]

    def awaited(self, ids: NDArray[np.uint64]) -> list[int]:
        """Return the moves among `ids` with waiting dependents."""
        return [ident for ident in ids.tolist() if ident in self._waiting] if self._waiting else []

    def ended(self, ident: int, *, ok: bool) -> list[int]:
        """Record the end of a move: its dependents become startable, or are dropped.

        Returns:
            The dropped moves. The manager has already failed them.
        """
        lost: list[int] = []
        ends = [ident]
        while ends and self._waiting:
            for job in self._waiting.pop(ends.pop(), ()):
                job.after = 0
                if ok:
                    self._offer(job)
                    continue
                job.go(JobState.LOST)
                self._forget(job)
                lost += job.ids.tolist()
                ends += job.ids.tolist()
        return lost

    def done(self, job: Job) -> None:
        """Record the end of a popped job: the next job at its place may start."""
        self._advance(job)

    def blocked_by(self, job: Job) -> list[int]:
        """Return the moves waiting for a job's place."""
        line = self._lines.get(job.place, []) if job.place else []
        return [ident for other in line if other is not job for ident in other.ids.tolist()]

    def cancel(
        self, ids: Collection[int] | NDArray[np.uint64] | None = None
    ) -> tuple[list[int], list[int]]:
        """Remove moves: all moves, or the waiting moves among `ids`.

        Returns:
            The removed moves, and their removed dependents.
        """
        if not self or (ids is not None and not len(ids)):
            return [], []
        carried = self._jobs()
        wanted = dict.fromkeys(carried if ids is None else map(int, ids))
        gone = [ident for ident in wanted if ident in carried]
        with_them: list[int] = []
        for ident in gone:
            job = carried.pop(ident, None)
            if job is not None:
                self._cut(job, ident)
                with_them += self.ended(ident, ok=False)
        lost = set(with_them)
        return [ident for ident in gone if ident not in lost], with_them

    def _cut(self, job: Job, ident: int) -> None:
        """Remove a move from a job, and remove the job with its last move."""
        job.drop(ident)
        self._moves -= 1
        if len(job.ids):
            return
        job.go(JobState.LOST)
        if not job.after:
            if job in self._of_state(job):
                del self._of_state(job)[job]
                self._advance(job)
            elif job.place is not None:
                self._lines[job.place].remove(job)
            return
        jobs = self._waiting[job.after]
        jobs.remove(job)
        if not jobs:
            del self._waiting[job.after]

    def _hurry(self, ident: int, urgency: Urgency) -> None:
        """Raise the job of a move and its dependencies to the urgency of a waiting job."""
        job = self._jobs().get(ident)
        while job is not None and job.urgency > urgency:
            if not job.after:
                self._raise(job, urgency)
            job.urgency = urgency
            job = self._of.get(job.after)

    def _offer(self, job: Job) -> None:
        """Make a job without an `after` ready, or append it to the line at its place."""
        if job.place is not None:
            line = self._lines.setdefault(job.place, [])
            line.append(job)
            if len(line) > 1:
                self._raise(line[0], job.urgency)
                return
        self._of_state(job)[job] = None

    def _advance(self, job: Job) -> None:
        """Remove the first job at a place and make the next job ready."""
        if job.place is None:
            return
        line = self._lines[job.place]
        line.pop(0)
        if not line:
            del self._lines[job.place]
            return
        line[0].urgency = min(other.urgency for other in line)
        self._of_state(line[0])[line[0]] = None

    def _raise(self, job: Job, urgency: Urgency) -> None:
        """Raise a job without an `after`, or the first job at its place."""
        first = self._lines[job.place][0] if job.place is not None else job
        if first.urgency > urgency and first in self._ready_with(first):
            del self._ready_with(first)[first]
            first.urgency = urgency
            self._ready_with(first)[first] = None

    def __iter__(self) -> Iterator[Job]:
        """Iterate over the startable jobs, most urgent first."""
        for urgency in Urgency:
            for ready in self._ready.values():
                yield from ready[urgency]
