"""Execute jobs on a thread of the runner, singly or batched into a storage call.

An exception of a tier fails the moves of the job and is reported.
Invariant: every job passed to `carry_out` is ended by it.
Cost: the copies, and a stream synchronization per progress report on a GPU.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from kvtrie.errors import TransferError
from kvtrie.transfer.job import run_together, takes_deadline
from kvtrie.transfer.job_state import JobState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtrie.transfer.job import Job
    from kvtrie.transfer.ledger import Ledger

__all__ = ["carry_out"]


def carry_out(
    ledger: Ledger, jobs: Sequence[Job], stream: torch.cuda.Stream | None, layers_per_report: int
) -> None:
    """Copy the bytes of running jobs and end the jobs.

    Args:
        ledger: the ledger of the jobs.
        jobs: a job, or several jobs for a single call of their storage.
        stream: the thread's copy stream on a GPU.
        layers_per_report: layers copied between two progress reports.
    """
    job = jobs[0]
    storage = job.target if job.store else job.source
    if len(jobs) > 1 or (job.batchable and takes_deadline(storage)):
        _carry_out_together(ledger, jobs)
        return
    try:
        ledger.admit(job)
        with torch.cuda.stream(stream) if stream is not None else nullcontext():
            if stream is not None and job.event is not None:
                stream.wait_event(job.event)
            for done in job.run(layers_per_report) if _reads(ledger, job) else ():
                if stream is not None:
                    stream.synchronize()
                if done < job.layers[1] - job.layers[0]:
                    ledger.advance(job, done)
    except BaseException as caught:  # noqa: BLE001 - any error of a tier fails the moves
        ledger.end(job, f"{type(caught).__name__}: {caught}")
    else:
        ledger.end(job)


def _carry_out_together(ledger: Ledger, jobs: Sequence[Job]) -> None:
    kind = TransferError.__name__
    for job in jobs:
        ledger.admit(job)
        if not _reads(ledger, job):
            ledger.end(job)
    jobs = [job for job in jobs if not job.over]
    try:
        errors = run_together(jobs, _deadline(ledger, jobs[0])) if jobs else []
    except BaseException as caught:  # noqa: BLE001 - any error of a tier fails the moves
        errors, kind = [str(caught)] * len(jobs), type(caught).__name__
    ledger.end_together(jobs, [None if why is None else f"{kind}: {why}" for why in errors])


def _reads(ledger: Ledger, job: Job) -> bool:
    """Copy the source of an admitted job if its slot may be reused before the job ends.

    Returns:
        Whether the job still has moves and has not passed its deadline.
    """
    if not len(job.ids):
        return False
    job.copy_source()
    with ledger.section.lock:
        return job.state is not JobState.LATE


def _deadline(ledger: Ledger, job: Job) -> int | None:
    """Return the deadline of a running job in nanoseconds of `time.monotonic_ns`."""
    if ledger.deadline_ns is None:
        return None
    return time.monotonic_ns() + job.started_ns + ledger.deadline_ns - ledger.clock()
