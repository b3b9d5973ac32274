"""Queue: jobs that have not started, in the order in which they should.

What a request waits for comes before what it may want later, and both before what is only written
down; a store that something waits for is as urgent as whatever waits.
Invariant: a job leaves the queue once: to run, cancelled, or because what it waits for failed.
Cost: constant per job and step, except for cancelling, which looks at every job.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtrie.transfer.job import Urgency

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from kvtrie.transfer.job import Job

__all__ = ["Queue"]


class Queue:
    """Jobs by urgency, and those that wait for a move of another one.

    It is not locked: its owner is.
    """

    def __init__(self) -> None:
        # By the id of a job's first move; a dict keeps the order of arrival.
        self._ready: dict[Urgency, dict[int, Job]] = {urgency: {} for urgency in Urgency}
        self._waiting: dict[int, list[Job]] = {}
        self._of: dict[int, Job] = {}

    def __len__(self) -> int:
        """How many moves wait to start."""
        return len(self._of)

    def add(self, job: Job) -> None:
        """Take a job in; one that waits for a move stays until `ended` tells how that went."""
        self._of.update(dict.fromkeys(job.ids, job))
        if job.after:
            self._waiting.setdefault(job.after, []).append(job)
            self._hurry(job.after, job.urgency)
        else:
            self._ready[job.urgency][job.ids[0]] = job

    def pop(self) -> Job | None:
        """The job to start next, which leaves the queue."""
        for jobs in self._ready.values():
            if jobs:
                job = jobs.pop(next(iter(jobs)))
                for ident in job.ids:
                    del self._of[ident]
                return job
        return None

    def ended(self, ident: int, *, ok: bool) -> list[int]:
        """A move has ended: what waited for it may start, or never will.

        Returns:
            The moves that leave the queue with it; the manager has failed these already.
        """
        lost: list[int] = []
        for job in self._waiting.pop(ident, ()):
            job.after = 0
            if ok:
                self._ready[job.urgency][job.ids[0]] = job
                continue
            for child in job.ids:
                del self._of[child]
                lost += [child, *self.ended(child, ok=False)]
        return lost

    def cancel(self, ids: Collection[int] | None = None) -> tuple[list[int], list[int]]:
        """Take moves out: all, or those of `ids` that are still here.

        Returns:
            The moves taken out, and those that waited for one of them and leave with it.
        """
        gone = [ident for ident in (self._of if ids is None else ids) if ident in self._of]
        with_them: list[int] = []
        for ident in gone:
            job = self._of.pop(ident, None)
            if job is not None:
                self._cut(job, ident)
                with_them += self.ended(ident, ok=False)
        lost = set(with_them)
        return [ident for ident in gone if ident not in lost], with_them

    def _cut(self, job: Job, ident: int) -> None:
        """Take one move out of a job, and the job away if that was its last."""
        if job.after:
            jobs = self._waiting[job.after]  # such a job has a single move
            jobs.remove(job)
            if not jobs:
                del self._waiting[job.after]
            return
        ready = self._ready[job.urgency]
        del ready[job.ids[0]]
        job.drop(ident)
        if job.ids:
            ready[job.ids[0]] = job

    def _hurry(self, ident: int, urgency: Urgency) -> None:
        """Whoever carries this move is awaited by something of that urgency."""
        job = self._of.get(ident)
        if job is None or job.urgency <= urgency:
            return
        if not job.after:
            del self._ready[job.urgency][job.ids[0]]
            self._ready[urgency][job.ids[0]] = job
        job.urgency = urgency
        if job.after:
            self._hurry(job.after, urgency)

    def __iter__(self) -> Iterator[Job]:
        """The jobs that could start now, the most urgent first."""
        for jobs in self._ready.values():
            yield from jobs.values()
