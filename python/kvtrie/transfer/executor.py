"""Executor: takes a manager's moves, copies the bytes on worker threads, reports completion.

The face of `Runner`: waiting, cancelling, keeping what lasts, and leaving the loads of a lease to
an engine that carries them out itself, layer by layer.
Invariant: whoever waits is woken by an end, a failure or a deadline. Cost: as of `Runner`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from kvtrie.errors import TransferError
from kvtrie.tiers import PersistentStorage, Pool
from kvtrie.transfer.deadline_call import DeadlineCall
from kvtrie.transfer.runner import Progress, Runner

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from types import TracebackType
    from typing import Any, Self

    from numpy.typing import NDArray

    from kvtrie import BlockManager, Committed, Lease
    from kvtrie.tiers import Storage
    from kvtrie.transfer.job import Job

__all__ = ["Executor", "Progress"]

_NS = 1_000_000_000


class Executor(Runner):
    """Runs the moves of one manager.

    What leases wait for comes first, then loads that nobody waits for, then stores. What nobody
    waits for keeps to the `io_budget` of both its tiers, and such stores wait while loads run that
    somebody waits for: both directions at once cost each of them 18 to 20 % on PCIe (Pensieve,
    section 4.3.2).

    With `workers=0` nothing is copied but while somebody calls `wait` or `drain`, and then one job
    after another, in the manager's order, which makes a run repeatable.

    Ctrl-C interrupts whoever waits, and nothing else: a copy that runs ends, and `drain` goes on
    later. One that is dropped without `close` cancels what has not started, and its threads end.
    It belongs to the process that made it: in a fork every call is a `ConfigError`.

    Args:
        manager: whose moves to run.
        pools: a `Pool` or a `Storage` per tier, in the manager's order: what `open_pools` gave,
            with the places of disk and remote tiers filled in.
        workers: threads that copy while the caller computes; on a GPU each has a copy stream of
            its own.
        deadline_s: seconds that a job may run before its moves are reported failed; what it
            holds stays out of use until it ends. While all workers hang, nothing else starts and
            what waits is cancelled. So long may a tier also take in `save`. None waits for ever.
        clock: nanoseconds, monotone; also the `now` of every report.
        layers_per_report: layers that are copied between two reports of progress.
        moves_per_job: the most moves that are copied and reported together.
        progress: called from the worker's thread whenever moves get further or end, well or not;
            those that were reported failed at their deadline, when they end. What it raises is
            logged, the first time.
        learn: give each lane the bandwidth and latency that its copies show, from then on.

    Attributes:
        feedback: what the lanes were seen to do.

    Raises:
        ConfigError: pools that do not match the manager's tiers, or whose bytes lie differently
            from each other's (a storage without a `block_format` takes any bytes), or numbers that
            cannot be. From any call: this is another process than the one that made it.
    """

    def __init__(
        self,
        manager: BlockManager,
        pools: Sequence[Pool | Storage | None],
        *,
        workers: int = 2,
        deadline_s: float | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
        layers_per_report: int = 8,
        moves_per_job: int = 64,
        progress: Callable[[Progress], None] | None = None,
        learn: bool = False,
    ) -> None:
        super().__init__(
            manager,
            pools,
            workers=workers,
            deadline_s=deadline_s,
            clock=clock,
            layers_per_report=layers_per_report,
            moves_per_job=moves_per_job,
            progress=progress,
            learn=learn,
        )
        self._deadline_calls: dict[int, DeadlineCall] = {}
        self._closing: list[Callable[[], None]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._section.here:  # a fork that leaves the block leaves what its parent holds alone
            self.close()

    def poll(self) -> int:
        """Hand new moves to the workers and fail those past their deadline; never blocks.

        Engines call it after whatever may have caused moves (acquire, commit, release).

        Returns:
            The number of moves that have not ended.

        Raises:
            TransferError: the executor is closed, or a worker could not report.
        """
        with self._section:
            self._poll()
            return self._left()

    def wait(self, lease: Lease) -> None:
        """Block until nothing that `lease` awaits is on its way.

        Raises:
            TransferError: the lease awaits moves that were never handed out, or that hang and may
                still write a slot of its own. Release it and acquire again.
        """
        stuck = f"lease {lease.id} awaits moves that hang or were never handed out: release it"
        self._until(lease.ready, stuck)

    def drain(self) -> None:
        """Block until every move, also those that others cause by ending, has ended.

        What runs past its deadline is not waited for. Loads that an engine carries out itself and
        has not begun are carried out here; what it has begun, it has to end.
        """
        with self._section:
            for lease in list(self._claimed):
                self._disclaim(lease)
        self._until(
            lambda: self._left() == self._late(), "moves are left that nobody can carry out"
        )

    def cancel(self, ids: Collection[int] | NDArray[np.uint64] | None = None) -> int:
        """Fail moves that have not started, which blames nobody: they can be asked for again.

        Args:
            ids: which moves; None means all. Those that run, have ended or are unknown are left
                alone.

        Returns:
            How many moves will not run, those that waited for them included.
        """
        with self._section:
            self._take()
            return self._cancel(ids, "cancelled")

    def flush(self) -> None:
        """Copy down what stands only above, as far as there is room, and wait for it.

        Afterwards a tier that outlives the process holds whole prefixes; see `save`. It takes as
        long as the `io_budget` of the tiers makes it take.
        """
        # A tier empties into the next one while that one is still being written: twice each.
        for _ in range(2 * len(self.pools)):
            self.drain()
            if not self.manager.flush(now=self.clock()):
                break
        self.drain()

    def save(self) -> None:
        """Flush, and let every lasting tier write down what it holds now, with ages and uses.

        Raises:
            TransferError: a tier did not write it down, or not within the deadline. What it wrote
                down before is found again all the same.
        """
        self.flush()
        for tier, pool in enumerate(self.pools):
            if isinstance(pool, PersistentStorage):
                self._keep(tier, pool)

    def restore(self) -> int:
        """Find again what lasting tiers kept; before the first request.

        Returns:
            How many blocks are there again.
        """
        with self._section:
            now = self.clock()
        return sum(
            self.manager.load_index(pool.recall(), tier, now=now)
            for tier, pool in enumerate(self.pools)
            if isinstance(pool, PersistentStorage)
        )

    def close(self) -> None:
        """Cancel the moves that have not started, let the running ones end, join the threads.

        A thread that hangs beyond the deadline is left behind. Closing twice does nothing.
        """
        with self._section:
            closing = list(self._closing)
        for close in closing:
            close()
        self._shut("the executor was closed before the move started")
        while True:
            with self._section:
                self._expire()
                hanging = {job.worker for job in self._running}
                if all(job.failed for job in self._running):
                    break
                ticket = self._section.ticket(self._patience())
            ticket.wait()
        for thread in self._threads:
            if thread not in hanging:
                thread.join()

    def acquire_claimed(self, action: Callable[[], Lease]) -> Lease:
        """Make a lease, and leave its loads to who asks for them by `claim`.

        Args:
            action: acquires or resumes it.
        """
        lease: Lease | None = None
        try:
            with self._section:
                self._poll()
                lease = action()
                self._claimed[lease.id] = []
                self._take()
                return lease
        except BaseException:
            if lease is not None:
                lease.release(now=self.clock())
            raise

    def claimable(self, lease: int) -> bool:
        """Whether `claim` has something to give."""
        with self._section.lock:
            return bool(self._claimed.get(lease))

    def claim(self, lease: int) -> list[Job]:
        """The claimed loads of a lease that have been handed out since the last call."""
        with self._section:
            self._take()
            jobs = self._claimed.get(lease, [])
            if jobs:
                self._claimed[lease] = []
            return jobs

    def disclaim(self, lease: int) -> None:
        """Carry out the loads of a lease that nobody has claimed like anybody's."""
        with self._section:
            self._disclaim(lease)

    def leases_of(self, ids: Collection[int]) -> set[int]:
        """The leases that carry out any of these moves themselves."""
        with self._section.lock:
            wanted = set(ids)
            running = (job for job in self._running if job.lease)
            jobs = [job for job in running if wanted.intersection(job.ids.tolist())]
            jobs += filter(None, map(self._queue.job_of, wanted))
            return {job.lease for job in jobs if job.lease}

    def startable(self, job: Job) -> bool:
        """Whether `begin` would not block."""
        with self._section.lock:
            return job.lost or job.begun or self._queue.free(job)

    def begin(self, job: Job) -> bool:
        """Block until a claimed job may start; False if it never will.

        Raises:
            TransferError: the executor is closed, or what the job waits for hangs.
        """
        self._until(lambda: job.lost or self._queue.free(job), f"{len(job.ids)} loads cannot start")
        with self._section:
            if job.lost:
                return False
            self._queue.take(job)
            self._running.append(job)
            job.begun = True
            return True

    def copying(self, job: Job) -> None:
        """A claimed job begins to copy: from now on its deadline counts."""
        with self._section.lock:
            job.started_ns = self.clock()
            self.feedback.began(job, job.started_ns)

    def copied(
        self,
        job: Job,
        brought: int,
        layer: int,
        *,
        handed: bool = False,
    ) -> None:
        """A claimed job has stopped copying.

        Args:
            job: which.
            brought: bytes that have come; 0 if that failed.
            layer: its layers below this one are there, which others may wait for.
            handed: they were only handed to a GPU, and `took` tells how long they took.
        """
        with self._section.lock:
            job.started_ns = None
            self.feedback.ended(job, self.clock(), brought=0 if handed else brought, handed=handed)
            if brought:
                job.there = layer
            self._section.notify_all()

    def took(self, job: Job, brought: int, ns: int) -> None:
        """A GPU has copied so many bytes of a job, and of others like it, in so many ns."""
        with self._section.lock:
            self.feedback.took(job, brought, ns)

    def tell(self, change: Callable[[], object]) -> None:
        """Change something that others look at within `until`."""
        with self._section.lock:
            change()
            self._section.notify_all()

    def end(self, job: Job, error: str | None = None, *, cancelled: bool = False) -> None:
        """A claimed job has ended: well, badly, or because nobody wants it any more."""
        self._end(job, error, cancelled=cancelled)

    def until(self, done: Callable[[], bool], stuck: str) -> None:
        """Block until something is so that moves bring about; looks again when any gets further.

        Raises:
            TransferError: with the text `stuck`, if no move is left that could bring it about.
        """
        self._until(done, stuck)

    def layer_there(self, ids: Collection[int], layer: int) -> bool:
        """Whether each of these moves, of which none has ended, has brought this layer."""
        with self._section.lock:
            left = set(ids)
            for job in self._running if left else ():
                if job.there > layer:
                    left.difference_update(job.ids.tolist())
            return not left

    def stalled(self, ids: Collection[int]) -> bool:
        """Whether moves, of which none has ended, wait for what engines carry out themselves.

        Some of them have not been handed out, and the executor has nothing to do.
        """
        with self._section.lock:
            busy = any(not job.lease for job in self._running) or any(self._queue)
            return not busy and len(self._unended(set(ids))) < len(ids)

    def quiet(self) -> bool:
        """Whether no load runs or waits that a lease awaits."""
        with self._section.lock:
            return not self._loading()

    def batched_put(
        self,
        lease: Lease,
        tokens: Any,  # noqa: ANN401
        blocks: range,
        spares: Sequence[int],
        target: int,
    ) -> Committed:
        """Commit tokens of a lease whose blocks have been brought down, layer by layer, already.

        The stores that the manager asks for then copy nothing: the slots that they would fill take
        over what has come down.

        Args:
            lease: whose tokens.
            tokens: the tokens, as `Lease.commit` takes them.
            blocks: the blocks, by index on the lease's path.
            spares: of each, the spare block of a pool that holds its bytes; the executor's from now
                on.
            target: the tier of that pool.
        """
        pool = self.pools[target]
        assert isinstance(pool, Pool)  # noqa: S101 - its caller looks
        left = np.asarray(spares, dtype=np.int64)
        try:
            with self._section:
                self._poll()
                held = lease.slots(0)[blocks.start : blocks.stop]
                committed = lease.commit(tokens, now=self.clock())
                moves = self.manager.moves()
                rows = np.flatnonzero(
                    (moves.src == 0)
                    & (moves.dst == target)
                    & (moves.layer_lo == 0)
                    & (moves.layer_hi == pool.layers)
                    & (moves.after == 0)
                )
                taken, left = left, left[:0]
                if not np.array_equal(held, moves.src_slot[rows]):  # not each of them is stored
                    _, of, at = np.intersect1d(
                        held, moves.src_slot[rows], assume_unique=True, return_indices=True
                    )
                    rows, left, taken = rows[at], np.delete(taken, of), taken[of]
                pool.adopt(moves.dst_slot[rows], taken)
                if len(rows) < len(moves):
                    self._accept(moves[np.delete(np.arange(len(moves)), rows)])
                ids = moves.id[rows]
                self._report(ids)
                self._take()
        finally:
            pool.put_back(left.tolist())
        self._told(ids, pool.layers, pool.layers, None)
        return committed

    def before_close(self, close: Callable[[], None]) -> None:
        """Have something closed first that uses this executor."""
        self._closing.append(close)

    def _keep(self, tier: int, pool: PersistentStorage) -> None:
        """As `PersistentStorage.keep`; with a deadline, a thread that hangs is left behind."""
        name = f"tier {tier} ({self.manager.tiers[tier].kind})"
        call = None
        with self._section:
            hung = self._deadline_calls.get(tier)
            if hung is not None and hung.running:
                seconds = f"{hung.seconds:.3f} s"
                raise TransferError(f"{name}: an earlier save still hangs after {seconds}")
            index = self.manager.index(tier, now=self.clock())
            if self._deadline_ns is not None:
                call = self._deadline_calls[tier] = DeadlineCall(
                    lambda: pool.keep(index), self.clock
                )
        if call is None or self._deadline_ns is None:
            pool.keep(index)
        elif not call.wait(self._deadline_ns):
            raise TransferError(
                f"{name}: {len(index)} blocks were not written down within "
                f"{self._deadline_ns / _NS:.3f} s"
            )
