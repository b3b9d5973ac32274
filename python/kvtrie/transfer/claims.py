"""Claims: loads executed by a layer-wise engine, layer by layer.

Claimed jobs wait in the runner's queue like all jobs, but only the engine starts them, by name. A
claim ends with its lease, and the runner's threads then take the remaining jobs.
Invariant: a claimed job begins once and ends once.
Cost: two short calls under the runner's lock per layer and job.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtrie.errors import ClosedError, TransferError
from kvtrie.transfer.job_state import JobState

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from kvtrie import BlockManager, Lease
    from kvtrie.transfer.feedback import Feedback
    from kvtrie.transfer.job import Job
    from kvtrie.transfer.layer_order import LayerOrder
    from kvtrie.transfer.runner import Runner

__all__ = ["Claims"]


class Claims:
    """Claimed loads by lease, over a manager and its runner.

    Args:
        manager: the manager of the leases.
        runner: its runner, whose queue and running jobs include the claimed jobs.
        feedback: receives the times of the claimed layers.
    """

    def __init__(self, manager: BlockManager, runner: Runner, feedback: Feedback) -> None:
        ledger = runner.ledger
        self._manager = manager
        self._runner = runner  # keeps the threads alive while an engine has loads
        self._ledger = ledger
        self._section = ledger.section
        self._schedule = ledger.schedule
        self._clock = ledger.clock
        self._feedback = feedback

    def acquire(self, action: Callable[[], Lease]) -> Lease:
        """Create a lease with claimed loads.

        Args:
            action: acquires or resumes the lease.
        """
        lease: Lease | None = None
        try:
            with self._section:
                self._ledger.poll(self.sweep)
                lease = action()
                self._ledger.claimed[lease.id] = []
                self._ledger.take()
                return lease
        except BaseException:
            if lease is not None:
                lease.release(now=self._clock())
            raise

    def claimable(self, lease: int) -> bool:
        """Return whether `claim` has any job for a lease."""
        with self._section.lock:
            return bool(self._ledger.claimed.get(lease))

    def claim(self, lease: int) -> list[Job]:
        """Return the loads of a claimed lease issued since the last call."""
        with self._section:
            self._ledger.take()
            jobs = self._ledger.claimed.get(lease, [])
            if jobs:
                self._ledger.claimed[lease] = []
            return jobs

    def alone(self, lease: Lease) -> bool:
        """Return whether a lease awaits only its claimed loads, none blocked by foreign moves.

        Args:
            lease: a lease made by `acquire`, before its first `claim`.
        """
        with self._section:
            self._ledger.take()
            jobs = self._ledger.claimed.get(lease.id, [])
            own = {ident for job in jobs for ident in job.ids.tolist()}
            free = self._schedule.queue.free
            return own.issuperset(lease.after.tolist()) and all(
                free(job) or job.after in own for job in jobs
            )

    def ready(self, lease: Lease) -> bool:
        """Return whether a lease is ready. Call it in the section.

        Awaited claims of every lease are handed to the runner's threads if no engine has taken
        them, because the pass of the claiming lease may never run.
        """
        if lease.ready():
            return True
        if any(self._ledger.claimed.values()):
            awaited = set(lease.after.tolist())
            for owner, jobs in list(self._ledger.claimed.items()):
                if any(awaited.intersection(job.ids.tolist()) for job in jobs):
                    self.disclaim(owner)
        return False

    def disclaim(self, lease: int) -> None:
        """Hand the waiting loads of a lease to the runner's threads."""
        with self._section:
            for job in self._ledger.claimed.pop(lease, ()):
                self._schedule.queue.hand_over(job)
            self._section.notify_all()

    def disclaim_all(self) -> None:
        """Hand all waiting claimed loads to the runner's threads."""
        with self._section:
            for lease in list(self._ledger.claimed):
                self.disclaim(lease)

    def sweep(self) -> None:
        """Disclaim the loads of released leases. Call it in the section."""
        for lease in [lease for lease, jobs in self._ledger.claimed.items() if jobs]:
            try:
                self._manager.lease(lease)
            except ClosedError:
                self.disclaim(lease)

    def leases_of(self, ids: Collection[int]) -> set[int]:
        """Return the leases with a claim on any of these moves."""
        with self._section.lock:
            wanted = set(ids)
            running = (job for job in self._schedule.running if job.lease)
            jobs = [job for job in running if wanted.intersection(job.ids.tolist())]
            jobs += filter(None, map(self._schedule.queue.job_of, wanted))
            return {job.lease for job in jobs if job.lease}

    def startable(self, job: Job) -> bool:
        """Return whether `begin` would return without blocking."""
        with self._section.lock:
            return job.state is not JobState.WAITING or self._schedule.queue.free(job)

    def begin(self, job: Job) -> bool:
        """Block until a claimed job may start, and return False if the job was lost.

        Raises:
            TransferError: the runner is closed, the job waits for a hung move, or the target
                refuses a block.
        """
        free = self._schedule.queue.free
        self.until(
            lambda: job.state is JobState.LOST or free(job), f"{len(job.ids)} loads cannot start"
        )
        with self._section:
            if job.state is JobState.LOST:
                return False
            self._schedule.queue.take(job)
            self._schedule.running.append(job)
            job.go(JobState.IDLE)
        # Blocks of a kept source are verified at the copy of their first layer.
        if failed := job.mark():
            error = f"{TransferError.__name__}: {next(iter(failed.values()))}"
            self.end(job, error)
            raise TransferError(error)
        return True

    def verify_source(self, job: Job) -> list[str]:
        """Verify the blocks of a kept source for a running job, and fail moves of damaged blocks.

        Returns:
            The reason of each failed move.
        """
        return self._ledger.fail(job, job.verify_source())

    def copying(self, job: Job) -> None:
        """Start the deadline of a claimed job at the copy of a layer."""
        with self._section.lock:
            job.started_ns = self._clock()
            # A job depending on a read of the same pass copies right after the read, while the
            # queue still counts the job as waiting.
            if job.state is JobState.IDLE:
                job.go(JobState.COPYING)
            self._feedback.began(job, job.started_ns)

    def copied(self, job: Job, brought: int, layer: int, *, handed: bool = False) -> None:
        """Stop the deadline of a claimed job after a layer was copied or has failed.

        Args:
            job: the job.
            brought: bytes copied, or 0 if the copy failed.
            layer: number of leading layers now present, for other leases waiting on this job.
            handed: the copy was only enqueued on a GPU. `record_copy_time` reports its time later.
        """
        with self._section.lock:
            # A late job stays late, and a failed job has already ended.
            if job.state is JobState.COPYING:
                job.go(JobState.IDLE)
            came = 0 if handed else brought
            self._feedback.ended(job, self._clock(), brought=came, handed=handed)
            if brought:
                job.copied_to = layer
            self._section.notify_all()

    def record_copy_time(self, job: Job, brought: int, ns: int) -> None:
        """Record the nanoseconds of a GPU copy shared by a job and similar jobs."""
        with self._section.lock:
            self._feedback.record_copy_time(job, brought, ns)

    def update(self, change: Callable[[], object]) -> None:
        """Change a value that `until` checks, and wake the threads that wait in it."""
        with self._section.lock:
            change()
            self._section.notify_all()

    def end(self, job: Job, error: str | None = None, *, cancelled: bool = False) -> None:
        """Report the end of a claimed job: success, failure or cancellation."""
        self._ledger.end(job, error, cancelled=cancelled)

    def until(self, done: Callable[[], bool], stuck: str) -> None:
        """Block until a condition holds, and check it again after each progress of a move.

        Raises:
            TransferError: with the text `stuck`, if no remaining move can make the condition true.
        """
        self._ledger.until(done, stuck, self.sweep)

    def tiers(self, lease: Lease) -> set[int]:
        """Return the source tiers of a lease's claimed loads, before `claim` returns them."""
        with self._section:
            self._ledger.take()
            return {job.tiers[0] for job in self._ledger.claimed.get(lease.id, [])}

    def layer_copied(self, ids: Collection[int], layer: int, order: LayerOrder) -> bool:
        """Return whether all of these unended moves have copied a layer."""
        with self._section.lock:
            left = set(ids)
            for job in self._schedule.running if left else ():
                if order.has_copied(job, layer):
                    left.difference_update(job.ids.tolist())
            return not left

    def stalled(self, ids: Collection[int]) -> bool:
        """Return whether unended moves wait only for claimed jobs.

        True if some of the moves were not issued yet and the runner's threads are idle.
        """
        with self._section.lock:
            busy = any(not job.lease for job in self._schedule.running)
            busy = busy or any(self._schedule.queue)
            return not busy and len(self._schedule.unended(set(ids))) < len(ids)

    def quiet(self) -> bool:
        """Return whether no load awaited by a lease is running."""
        with self._section.lock:
            return not self._schedule.loading()
