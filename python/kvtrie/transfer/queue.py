"""Queue: jobs that have not started, in the order in which they should.

Jobs that a lease awaits come before prefetches, and both before stores that no job waits for.
Priority inheritance: a job and its dependencies get the urgency of the job that waits for them.
Jobs of each storage may have a separate order. Jobs at one slot of a storage run one at a time, in
the order of arrival. Claimed loads wait here for their turn too, but their engine takes them by
name.
Invariant: a job leaves the queue once: to run, cancelled, or because its `after` has failed.
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
    """Jobs by urgency, and those that wait for a move of another one.

    It is not locked: its owner is.

    Args:
        split: whether jobs of each storage have a separate order, so that other jobs never queue
            behind them.
    """

    def __init__(self, *, split: bool = False) -> None:
        self._split = split
        # By storage and urgency, in the order in which they became free to start.
        self._ready: dict[int | None, dict[Urgency, OrderedDict[Job, None]]] = {}
        self._claimed: OrderedDict[Job, None] = (
            OrderedDict()
        )  # ready too, for the engines that have claimed them
        self._waiting: dict[int, list[Job]] = {}
        # By place, in order: the first one runs or is ready, the others wait for its end.
        self._lines: dict[Place, list[Job]] = {}
        # The job of each move, filled at the first look-up: most jobs run before there is one.
        self._of: dict[int, Job] = {}
        self._new: dict[Job, None] = {}
        self._moves = 0

    def __len__(self) -> int:
        """The number of moves that wait to start."""
        return self._moves

    def add(self, job: Job) -> None:
        """Take a job in; a job with an `after` waits until `ended` reports that move."""
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
        """Return the job to start next, which leaves the queue.

        Args:
            may: whether a job may start now; None allows all.
            joining: if given, return the job only if it joins this one; otherwise it stays.
            storage: the storage whose job it is, None for a job between pools; without `split`, it
                means nothing.
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
        """A claimed job that may start leaves the queue."""
        self._leave(job)

    def hand_over(self, job: Job) -> None:
        """Give a claimed job to the threads."""
        free = job in self._claimed
        if free:
            del self._claimed[job]
        job.lease = 0
        if free:
            self._ready_with(job)[job] = None

    def job_of(self, ident: int) -> Job | None:
        """Return the job that waits here with a move."""
        return self._jobs().get(ident)

    def _jobs(self) -> dict[int, Job]:
        """The job of each move."""
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
        """The ordered set that a job is in while it may start."""
        return self._claimed if job.lease else self._ready_with(job)

    def _ready_with(self, job: Job) -> OrderedDict[Job, None]:
        """The ready jobs of a job's storage and urgency."""
        storage = job.storage if self._split else None
        if storage not in self._ready:
            self._ready[storage] = {urgency: OrderedDict() for urgency in Urgency}
        return self._ready[storage][job.urgency]

    def ready(self, storage: int | None) -> int:
        """Return the number of jobs of a storage that could start now; of all without `split`."""
        return sum(map(len, self._ready.get(storage if self._split else None, {}).values()))

    def of_storage(self, storage: int | None) -> list[Job]:
        """All jobs of a storage, those that wait for a move included; None without `split`."""
        jobs = dict.fromkeys(self._jobs().values())
        return [job for job in jobs if not self._split or job.storage == storage]

    def awaited(self, ids: NDArray[np.uint64]) -> list[int]:
        """Those of the moves that something here waits for."""
        return [ident for ident in ids.tolist() if ident in self._waiting] if self._waiting else []

    def ended(self, ident: int, *, ok: bool) -> list[int]:
        """Note the end of a move: jobs that waited for it may start, or never will.

        Returns:
            The moves that leave the queue with it; the manager has failed these already.
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
        """A job that was popped runs no longer: the next one at its place may start."""
        self._advance(job)

    def blocked_by(self, job: Job) -> list[int]:
        """Return the moves that wait for a job's place."""
        line = self._lines.get(job.place, []) if job.place else []
        return [ident for other in line if other is not job for ident in other.ids.tolist()]

    def cancel(
        self, ids: Collection[int] | NDArray[np.uint64] | None = None
    ) -> tuple[list[int], list[int]]:
        """Take moves out: all, or those of `ids` that are still here.

        Returns:
            The moves taken out, and those that waited for one of them and leave with it.
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
        """Take one move out of a job, and the job away if that was its last."""
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
        """Raise the job of a move, and those before it, to the urgency of a job that awaits it."""
        job = self._jobs().get(ident)
        while job is not None and job.urgency > urgency:
            if not job.after:
                self._raise(job, urgency)
            job.urgency = urgency
            job = self._of.get(job.after)

    def _offer(self, job: Job) -> None:
        """Make a job that waits for no move ready, or put it in line for its place."""
        if job.place is not None:
            line = self._lines.setdefault(job.place, [])
            line.append(job)
            if len(line) > 1:
                self._raise(line[0], job.urgency)
                return
        self._of_state(job)[job] = None

    def _advance(self, job: Job) -> None:
        """The first job at a place is gone."""
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
        """Raise a job that waits for no move, or the one that has its place before it."""
        first = self._lines[job.place][0] if job.place is not None else job
        if first.urgency > urgency and first in self._ready_with(first):
            del self._ready_with(first)[first]
            first.urgency = urgency
            self._ready_with(first)[first] = None

    def __iter__(self) -> Iterator[Job]:
        """The jobs that could start now, the most urgent first."""
        for urgency in Urgency:
            for ready in self._ready.values():
                yield from ready[urgency]
