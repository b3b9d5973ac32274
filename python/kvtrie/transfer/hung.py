"""Hung jobs: finds the moves blocked by jobs past their deadline.

Blocked moves wait for the same slot of a storage. While every thread of a storage hangs, or every
thread for copies between pools, all moves waiting for these threads are blocked too.
Invariant: nothing is changed here. The caller cancels.
Cost: none without a hung job, otherwise a step per waiting job.
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
    schedule: Schedule, threads: Mapping[int | None, Sequence[threading.Thread]], *, inline: bool
) -> Iterator[tuple[list[int], str, bool]]:
    """Yield moves to cancel, the reason, and whether to report them as failed instead.

    The caller cancels each part before it requests the next part.

    Args:
        schedule: the waiting and running jobs.
        threads: the threads of each storage, and under None the threads for copies between pools.
        inline: whether a single thread executes all jobs.
    """
    queue = schedule.queue
    hung = [job for job in schedule.running if job.state is JobState.LATE]
    if not hung:
        return
    blocked = [ident for job in hung for ident in queue.blocked_by(job)]
    yield blocked, "the move before it at its place hangs", False
    for storage, own in threads.items():
        late = [job for job in hung if inline or job.storage == storage]
        if len({job.worker for job in late} - {None}) < len(own):
            continue
        waiting = queue.of_storage(storage)
        # Blame an awaited store: otherwise a manager would plan another block's store in its
        # place, then the first block's store again, without end.
        awaited = [
            ident
            for job in waiting
            if job.store and job.urgency == Urgency.DEMAND and not job.after
            for ident in job.ids.tolist()
        ]
        why = "every worker hangs"
        yield awaited, why, True
        yield [ident for job in waiting for ident in job.ids.tolist()], why, False
