"""Hung jobs: the moves that jobs past their deadline keep from starting.

Those are the moves that wait for the same slot of a storage and, while every thread of a storage
hangs, or every thread that copies between pools, all moves that wait for it.
Invariant: nothing is changed here; the caller cancels. Cost: none while no job hangs; otherwise a
step per waiting job.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtrie.transfer.job import Urgency
from kvtrie.transfer.job_state import JobState

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator, Mapping, Sequence

    from kvtrie.transfer.schedule import Schedule

__all__ = ["kept_from_starting"]


def kept_from_starting(
    schedule: Schedule, threads: Mapping[int | None, Sequence[threading.Thread]], *, on_call: bool
) -> Iterator[tuple[list[int], str, bool]]:
    """Yield moves to cancel, the reason, and whether they are reported as failed instead.

    The caller cancels each part before it asks for the next one.

    Args:
        schedule: the jobs that wait and run.
        threads: the threads of each storage; those between pools under None.
        on_call: whether one thread carries out all jobs.
    """
    queue = schedule.queue
    hung = [job for job in schedule.running if job.state is JobState.LATE]
    if not hung:
        return
    blocked = [ident for job in hung for ident in queue.blocked_by(job)]
    yield blocked, "the move before it at its place hangs", False
    for storage, own in threads.items():
        late = [job for job in hung if on_call or job.storage == storage]
        if len({job.worker for job in late} - {None}) < len(own):
            continue
        waiting = queue.of_storage(storage)
        # An awaited store is blamed: a manager would otherwise ask for another block's in its
        # place, then for that of the first again, without end.
        awaited = [
            ident
            for job in waiting
            if job.store and job.urgency == Urgency.DEMAND and not job.after
            for ident in job.ids.tolist()
        ]
        why = "every worker hangs"
        yield awaited, why, True
        yield [ident for job in waiting for ident in job.ids.tolist()], why, False
