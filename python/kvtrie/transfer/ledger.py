"""Ledger: tracks the moves of a runner from submission to their final report.

It queues moves, begins their jobs, fails late and blocked moves, and starts or drops dependents. It
copies nothing.
Invariant: a move starts only after its `after` has ended well. Each move is reported exactly once
as done or failed. A move reported failed while still running is reported again at its end.
Cost: a lock, held for bookkeeping and sink calls (microseconds), never for a copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np

from kvtrie.errors import ConfigError, TransferError
from kvtrie.transfer.addresses import misaddressed
from kvtrie.transfer.hung import kept_from_starting
from kvtrie.transfer.job import group
from kvtrie.transfer.job_state import JobState
from kvtrie.transfer.remote_stores import RemoteStores
from kvtrie.transfer.schedule import Schedule
from kvtrie.transfer.section import Section

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Collection, Mapping, Sequence

    import torch
    from numpy.typing import NDArray

    from kvtrie import Moves
    from kvtrie.settings.tier import Tier
    from kvtrie.tiers import TierBytes
    from kvtrie.transfer.job import Job
    from kvtrie.transfer.outbox import Outbox

__all__ = ["Ledger"]

_NS = 1_000_000_000
_DEPENDS = "the move that it waits for has failed"


class Ledger:
    """The unended moves of a runner.

    Args:
        pools: the pool or storage of each tier, or None for bytes outside this process.
        tiers: the manager's tiers.
        threads: the threads of each storage, and under None the threads for copies between pools.
        outbox: receives the reports, and holds the sink for more moves.
        inline: whether a single thread executes all jobs, and only during a waiting call.
        deadline_ns: maximum run time of a job in nanoseconds, after which its moves are reported
            failed, or None for no limit.
        clock: nanoseconds, monotone.
        moves_per_job: maximum number of moves copied and reported together.
        compute: the stream possibly still writing the sources of new moves, or None without a GPU.

    Attributes:
        pools: as given, like `clock`, `deadline_ns`, `moves_per_job` and `inline`.
        section: the lock of the attributes below.
        schedule: waiting and running jobs.
        claimed: by lease, claimed loads not yet begun by a layer-wise engine.
        closed: whether the runner was closed or dropped.

    Raises:
        ConfigError: the write limit of a remote tier is below the size of a block.
    """

    def __init__(
        self,
        pools: Sequence[TierBytes | None],
        tiers: Sequence[Tier],
        threads: Mapping[int | None, Sequence[threading.Thread]],
        outbox: Outbox,
        *,
        inline: bool,
        deadline_ns: int | None,
        clock: Callable[[], int],
        moves_per_job: int,
        compute: torch.cuda.Stream | None,
    ) -> None:
        self.pools = tuple(pools)
        self.clock = clock
        self.deadline_ns = deadline_ns
        self.moves_per_job = moves_per_job
        self._compute = compute
        self.section = Section()
        self.inline = inline
        self._remote = RemoteStores(pools, tiers, threads, moves_per_job)
        self.schedule = Schedule(tiers, split=not inline, limits=self._remote.limits)
        self.claimed: dict[int, list[Job]] = {}
        self.closed = False
        self._threads = threads
        self._outbox = outbox
        self._broken: BaseException | None = None
        self._given: list[Job] = []  # with `inline`: the thread's next jobs

    def submit(self, moves: Moves) -> None:
        """Accept moves, as for `Runner.submit`."""
        with self.section:
            self.check()
            ids = moves.id.tolist()
            again = self.schedule.unended(set(ids))
            if again or len(set(ids)) < len(ids):
                raise ConfigError(f"{len(ids)} moves, {len(again)} of them here already, or twice")
            why = misaddressed(moves, self.pools)
            for row, reason in why.items():
                self.report([ids[row]], error=reason)
            # In topological order, so one pass finds chains. Few batches have dependencies.
            for row in np.flatnonzero(moves.after).tolist():
                if row not in why and int(moves.after[row]) in self._outbox.failed:
                    why[row] = _DEPENDS
                    self.report([ids[row]], error=_DEPENDS, cancelled=True)
            self.accept(moves if not why else moves[np.delete(np.arange(len(moves)), [*why])])

    def cancel(
        self,
        ids: Collection[int] | NDArray[np.uint64] | None,
        why: str,
        *,
        blame: bool = False,
    ) -> int:
        """Cancel moves not yet started, as for `Runner.cancel`."""
        with self.section:
            gone, with_them = self.schedule.queue.cancel(ids)
            if gone:
                self.report(gone, error=why, cancelled=not blame)
                self._lose(with_them)
                self.section.notify_all()
            return len(gone) + len(with_them)

    def shut(self, why: str) -> None:
        """Cancel the moves not yet started. The threads end after their last job."""
        with self.section:
            if not self.closed:
                self.closed = True
                self.cancel(None, why)
                self.section.notify_all()

    def abandon(self, why: str) -> None:
        """Cancel every move, including running jobs, because no thread works for them."""
        self.shut(why)
        for job in list(self.schedule.running):
            self.end(job, why, cancelled=True)

    def wake(self) -> None:
        """Make every waiting thread check again."""
        with self.section:
            self.section.notify_all()

    @property
    def in_own_process(self) -> bool:
        """Whether this process created the ledger."""
        return self.section.in_own_process

    @property
    def pending(self) -> int:
        """Number of unended moves, including hung moves."""
        with self.section.lock:
            return self.schedule.left()

    @property
    def hangs(self) -> bool:
        """Whether all unended moves hang."""
        with self.section.lock:
            return self.schedule.left() == self.schedule.late()

    @property
    def over(self) -> bool:
        """Whether moves are refused: after closing, or after a failed report."""
        return self.closed or self._broken is not None

    def check(self) -> None:
        """Raise if moves are refused.

        Raises:
            TransferError: the runner is closed, or a worker could not report.
        """
        if self._broken is not None:
            raise TransferError(f"a worker could not report: {self._broken}") from self._broken
        if self.closed:
            raise TransferError("the runner is closed")

    def poll(self, before: Callable[[], object] | None = None) -> bool:
        """Take new moves and fail late and blocked moves. Call it in the section.

        Args:
            before: called first, unless moves are refused.

        Returns:
            Whether anything has changed.
        """
        self.check()
        if before is not None:
            before()
        return any([self._expire(), self.take(), self._give_up()])

    def until(
        self,
        done: Callable[[], bool],
        stuck: str,
        before: Callable[[], object] | None = None,
    ) -> None:
        """Block until a condition holds, and check it again after each change of a move.

        Args:
            done: the condition, called in the section.
            stuck: text of the error.
            before: called before each check, in the section.

        Raises:
            TransferError: with the text `stuck`, if no remaining move can make the condition true.
        """
        while True:
            with self.section:
                news = self.poll(before)
                if done():
                    return
                if self.inline:
                    self._give()
                if news:
                    continue
                if self.hangs:
                    raise TransferError(stuck)
                ticket = self.section.ticket(self.patience())
            ticket.wait()

    def await_running(self) -> set[threading.Thread | None]:
        """Block until all running jobs have ended or hang, and return the threads of hung jobs."""
        while True:
            with self.section:
                self._expire()
                running = self.schedule.running
                if all(job.state is JobState.LATE for job in running):
                    return {job.worker for job in running}
                ticket = self.section.ticket(self.patience())
            ticket.wait()

    def take(self) -> bool:
        """Accept new moves of the sink and return whether there were any. Call it in the section.

        The lock is held, so no completion can happen in between.
        """
        sink = self._outbox.sink
        if sink is None or self.over:
            return False
        moves = sink.more(self._remote.room(self.schedule))
        if self._remote.tier is not None:
            self._remote.count_dropped(sink.dropped())
        if not len(moves):
            return False
        self.accept(moves)
        return True

    def accept(self, moves: Moves) -> None:
        """Queue moves with valid addresses. Call it in the section."""
        event = self._compute.record_event() if self._compute is not None else None
        schedule, claimed = self.schedule, self.claimed
        pools = cast("Sequence[TierBytes]", self.pools)  # the tiers of the moves are not None
        for job in group(moves, pools, schedule.unended, self.moves_per_job, claimed):
            job.event = event
            schedule.queue.add(job)
            if job.lease:
                claimed[job.lease].append(job)
        self.section.notify_all()

    def begin(self, worker: threading.Thread, storage: int | None) -> list[Job]:
        """Return the next jobs of a thread. Call it in the section.

        Args:
            worker: the thread.
            storage: the storage of the thread, or None for copies between pools.
        """
        self._expire()
        jobs, self._given = self._given, []
        return jobs if self.inline else self._next(worker, storage)

    def end(self, job: Job, error: str | None = None, *, cancelled: bool = False) -> None:
        """Report the end of a running job and start its dependents.

        Args:
            job: the job.
            error: the reason of a failure, or None.
            cancelled: cancelled by its lease, so neither source nor destination is to blame.
        """
        self.end_together([job], [error], cancelled=cancelled)

    def end_together(
        self, jobs: Sequence[Job], errors: Sequence[str | None], *, cancelled: bool = False
    ) -> None:
        """Report the end of several running jobs, as `end`, with a single wake of the threads."""
        with self.section:
            errors = [
                self._end(job, error, cancelled=cancelled)
                for job, error in zip(jobs, errors, strict=True)
            ]
            try:
                self.take()
            except Exception as broken:  # noqa: BLE001 - raised to the waiting caller
                self.stop(broken)
            self.section.notify_all()
        for job, error in zip(jobs, errors, strict=True):
            if error is not None and not (cancelled or job.expired):
                self._outbox.warn_of_store(job, error)
            layers = job.layers[1] - job.layers[0]
            self.report_progress(job.ids, layers if error is None else 0, layers, error)

    def _end(self, job: Job, error: str | None, *, cancelled: bool) -> str | None:
        """End a job and return its reported error. Call it in the section."""
        self.schedule.running.remove(job)
        self.schedule.queue.done(job)
        late = job.state is JobState.LATE
        job.go(JobState.EXPIRED if late else JobState.ENDED)
        if late:
            error = "the move ended past its deadline"
        # A claimed job has reported each of its layers to the sink.
        if (sink := self._outbox.sink) is not None and not job.lease:
            brought = job.bytes if error is None else 0
            sink.ended(job, self.clock(), brought=brought)
        job.record_end(ok=error is None)
        self.report(job.ids, error=error, cancelled=cancelled and not late)
        self._release(job.ids, ok=error is None)
        return error

    def report(
        self,
        ids: Sequence[int] | NDArray[np.uint64],
        *,
        layers_done: int | None = None,
        error: str | None = None,
        hung: bool = False,
        cancelled: bool = False,
    ) -> None:
        """Pass a report to the sink, or keep it for `Runner.reports`. Call it in the section.

        Args:
            ids: the moves.
            layers_done: number of copied layers, for running moves.
            error: the reason of a failure, or None.
            hung: the moves passed the deadline and still run.
            cancelled: the moves failed without starting.
        """
        if not len(ids):
            return
        try:
            self._outbox.report(
                ids, layers_done=layers_done, error=error, hung=hung, cancelled=cancelled
            )
        except Exception as broken:  # noqa: BLE001 - raised to the waiting caller
            self.stop(broken)

    def report_progress(
        self,
        ids: Sequence[int] | NDArray[np.uint64],
        layers_done: int,
        layers: int,
        error: str | None,
    ) -> None:
        """Call the progress callback, as `Outbox.progress`."""
        self._outbox.progress(ids, layers_done, layers, error, self.schedule.left)

    def patience(self) -> float | None:
        """Return the seconds until a deadline passes or a budget frees a job; None if never."""
        return self.schedule.patience(self.deadline_ns, self.clock())

    def _give(self) -> None:
        """Hand the next jobs to the idle thread, with `workers=0`.

        The caller only waits, so Ctrl-C does not stop a copy half-way.
        """
        (thread,) = self._threads[None]
        if not any(job.worker is thread for job in self.schedule.running):
            self._given = self._next(thread)
            self.section.notify_all()

    def _next(self, worker: threading.Thread, storage: int | None = None) -> list[Job]:
        now = self.clock()
        jobs = self.schedule.next(worker, self.moves_per_job, now, storage)
        if (sink := self._outbox.sink) is not None:
            for job in jobs:
                sink.began(job, now)
        return jobs

    def admit(self, job: Job) -> None:
        """Verify and mark the blocks of a running job in kept pools, before its first copy.

        Moves of unusable blocks leave the job and are reported failed.
        """
        self.fail(job, job.verify_source())
        self.fail(job, job.mark())

    def fail(self, job: Job, failed: Mapping[int, str]) -> list[str]:
        """Report moves of a running job failed, remove them and return the reasons."""
        for ident, why in failed.items():
            error = f"{TransferError.__name__}: {why}"
            ids = np.array([ident], dtype=np.uint64)
            with self.section:
                job.drop(ident)
                self.report(ids, error=error)
                self._release(ids, ok=False)
                self.section.notify_all()
            self._outbox.warn_of_store(job, error)
            self.report_progress(ids, 0, job.layers[1] - job.layers[0], error)
        return [*failed.values()]

    def advance(self, job: Job, layers_done: int) -> None:
        """Report the number of layers copied by a running job so far."""
        with self.section:
            late = job.state is JobState.LATE
            if not late:
                job.copied_to = job.layers[0] + layers_done
                self.report(job.ids, layers_done=layers_done)
                self.section.notify_all()
        if not late:
            self.report_progress(job.ids, layers_done, job.layers[1] - job.layers[0], None)

    def _release(self, ids: NDArray[np.uint64], *, ok: bool) -> None:
        """Start the dependents of successful moves, and drop the dependents of failed moves."""
        for ident in self.schedule.queue.awaited(ids):
            self._lose(self.schedule.queue.ended(ident, ok=ok))

    def _lose(self, ids: list[int]) -> None:
        """Report moves dropped from the queue with their `after`."""
        # A manager has already failed them, together with their `after`.
        if ids and self._outbox.sink is None:
            self.report(ids, error=_DEPENDS, cancelled=True)

    def _give_up(self) -> bool:
        """Cancel the moves blocked by hung jobs and return whether there were any."""
        parts = kept_from_starting(self.schedule, self._threads, inline=self.inline)
        return sum(self.cancel(ids, why, blame=blame) for ids, why, blame in parts) > 0

    def _expire(self) -> bool:
        """Report late jobs as failed. Call it in the section.

        Returns:
            Whether there were any.
        """
        if self.deadline_ns is None:
            return False
        now, found = self.clock(), False
        for job in self.schedule.running:
            took = now - job.started_ns
            if job.state is not JobState.COPYING or took < self.deadline_ns:
                continue
            job.go(JobState.LATE)
            found = True
            why = f"no end after {took / _NS:.3f} s"
            self.report(job.ids, error=why, hung=True)
            self._outbox.warn_of_store(job, why)
            self._release(job.ids, ok=False)
            self.section.notify_all()
        return found

    def stop(self, broken: BaseException) -> None:
        """Make each waiting or later caller raise for the error of a worker."""
        with self.section:
            self._broken = broken
            self.section.notify_all()
