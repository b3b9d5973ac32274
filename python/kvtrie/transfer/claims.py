"""Claims: the loads that a layer-wise engine carries out itself, layer by layer.

Their jobs wait in the runner's queue for their turn like any, but no thread of the runner takes
them: the engine does, by name. A claim ends with its lease; its jobs are then the threads'.
Invariant: a claimed job is begun once and ended once. Cost: per layer and job two short calls under
the runner's lock.
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
    """Claimed loads by lease, over one manager and its runner.

    Args:
        manager: the manager that has the leases.
        runner: its runner, whose queue and running jobs include the claimed ones.
        feedback: takes the times of their layers.
    """

    def __init__(self, manager: BlockManager, runner: Runner, feedback: Feedback) -> None:
        ledger = runner.ledger
        self._manager = manager
        self._runner = runner  # its threads live as long as an engine has loads of it
        self._ledger = ledger
        self._section = ledger.section
        self._schedule = ledger.schedule
        self._clock = ledger.clock
        self._feedback = feedback

    def acquire(self, action: Callable[[], Lease]) -> Lease:
        """Make a lease whose loads are claimed.

        Args:
            action: acquires or resumes it.
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
        """Return whether `claim` has any job to give."""
        with self._section.lock:
            return bool(self._ledger.claimed.get(lease))

    def claim(self, lease: int) -> list[Job]:
        """Return the loads of a claimed lease that have been handed out since the last call."""
        with self._section:
            self._ledger.take()
            jobs = self._ledger.claimed.get(lease, [])
            if jobs:
                self._ledger.claimed[lease] = []
            return jobs

    def alone(self, lease: Lease) -> bool:
        """Return whether a lease awaits its claimed loads alone, and each can start without others.

        Args:
            lease: made by `acquire`, whose loads `claim` has not given.
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
        """From within the section: return whether a lease is ready.

        Claimed loads that it awaits and that no engine has taken go to the runner's threads: the
        pass of the lease that claimed them may never come.
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
        """Leave the loads of a lease that were not begun to the runner's threads."""
        with self._section:
            for job in self._ledger.claimed.pop(lease, ()):
                self._schedule.queue.hand_over(job)
            self._section.notify_all()

    def disclaim_all(self) -> None:
        """Leave all loads that were not begun to the runner's threads."""
        with self._section:
            for lease in list(self._ledger.claimed):
                self.disclaim(lease)

    def sweep(self) -> None:
        """From within the section: disclaim the loads of leases that were released."""
        for lease in [lease for lease, jobs in self._ledger.claimed.items() if jobs]:
            try:
                self._manager.lease(lease)
            except ClosedError:
                self.disclaim(lease)

    def leases_of(self, ids: Collection[int]) -> set[int]:
        """Return the leases that have claimed any of these moves."""
        with self._section.lock:
            wanted = set(ids)
            running = (job for job in self._schedule.running if job.lease)
            jobs = [job for job in running if wanted.intersection(job.ids.tolist())]
            jobs += filter(None, map(self._schedule.queue.job_of, wanted))
            return {job.lease for job in jobs if job.lease}

    def startable(self, job: Job) -> bool:
        """Return whether `begin` would not block."""
        with self._section.lock:
            return job.state is not JobState.WAITING or self._schedule.queue.free(job)

    def begin(self, job: Job) -> bool:
        """Block until a claimed job may start; False if it never will.

        Raises:
            TransferError: the runner is closed, or the move that the job waits for hangs.
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
        # What a kept source has is proved when its first layer is copied.
        if failed := job.mark():
            error = f"{TransferError.__name__}: {next(iter(failed.values()))}"
            self.end(job, error)
            raise TransferError(error)
        return True

    def prove(self, job: Job) -> list[str]:
        """Prove what a kept source of a begun job has; fail the moves of damaged blocks.

        Returns:
            Why moves have failed.
        """
        return self._ledger.fail(job, job.prove())

    def copying(self, job: Job) -> None:
        """Start the deadline of a claimed job, which begins to copy a layer."""
        with self._section.lock:
            job.started_ns = self._clock()
            # A job whose `after` is a read of the same pass copies right after that read, while the
            # queue still counts it as waiting.
            if job.state is JobState.IDLE:
                job.go(JobState.COPYING)
            self._feedback.began(job, job.started_ns)

    def copied(self, job: Job, brought: int, layer: int, *, handed: bool = False) -> None:
        """Stop the deadline of a claimed job, whose layer is copied or has failed.

        Args:
            job: the job.
            brought: bytes that have come; 0 if that failed.
            layer: its layers below this one are there, which other leases may wait for.
            handed: the bytes were only handed to a GPU, and `took` reports the time later.
        """
        with self._section.lock:
            # One past its deadline stays so; one that failed has ended.
            if job.state is JobState.COPYING:
                job.go(JobState.IDLE)
            came = 0 if handed else brought
            self._feedback.ended(job, self._clock(), brought=came, handed=handed)
            if brought:
                job.there = layer
            self._section.notify_all()

    def took(self, job: Job, brought: int, ns: int) -> None:
        """Note the nanoseconds in which a GPU has copied bytes of a job and of others like it."""
        with self._section.lock:
            self._feedback.took(job, brought, ns)

    def update(self, change: Callable[[], object]) -> None:
        """Change a value that `until` checks, and wake the threads that wait in it."""
        with self._section.lock:
            change()
            self._section.notify_all()

    def end(self, job: Job, error: str | None = None, *, cancelled: bool = False) -> None:
        """Report a claimed job: ended well, failed, or given up."""
        self._ledger.end(job, error, cancelled=cancelled)

    def until(self, done: Callable[[], bool], stuck: str) -> None:
        """Block until moves have brought something about; looks again when any gets further.

        Raises:
            TransferError: with the text `stuck`, if no move is left that could bring it about.
        """
        self._ledger.until(done, stuck, self.sweep)

    def tiers(self, lease: Lease) -> set[int]:
        """Return the tiers that a lease has claimed loads from, which `claim` has not given."""
        with self._section:
            self._ledger.take()
            return {job.tiers[0] for job in self._ledger.claimed.get(lease.id, [])}

    def layer_there(self, ids: Collection[int], layer: int, order: LayerOrder) -> bool:
        """Return whether each of these moves, of which none has ended, has brought this layer."""
        with self._section.lock:
            left = set(ids)
            for job in self._schedule.running if left else ():
                if order.there(job, layer):
                    left.difference_update(job.ids.tolist())
            return not left

    def stalled(self, ids: Collection[int]) -> bool:
        """Return whether moves, of which none has ended, wait for claimed jobs alone.

        Some of them have not been handed out, and the runner's threads have nothing to do.
        """
        with self._section.lock:
            busy = any(not job.lease for job in self._schedule.running)
            busy = busy or any(self._schedule.queue)
            return not busy and len(self._schedule.unended(set(ids))) < len(ids)

    def quiet(self) -> bool:
        """Return whether no load runs that a lease awaits."""
        with self._section.lock:
            return not self._schedule.loading()
