"""Runner: a pool of threads that carries out moves on copy streams, without a manager.

It runs in the process that holds the bytes. In the manager's process an `Executor` feeds it; in any
other process moves arrive by `submit`, and `reports` are sent back to the manager's process.
Invariant: a move starts only after its `after` has ended well; each move is reported exactly once
as done or failed; one that still runs when it is reported failed is reported again when it ends;
nothing waits for a device beyond the deadline; no store of the background starts while a load runs
that a lease awaits. Each storage has its own threads and queue: one that hangs keeps only its own
threads and slots, and copies between pools never wait for it. A store to a remote tier that a
request would wait for is not carried out: eviction never waits for a shared store. Cost: one lock,
held for bookkeeping and calls of the sink (microseconds), never for a copy.
One file beyond 600 lines: all methods hold that lock over the same tables of jobs.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import weakref
from contextlib import nullcontext
from typing import TYPE_CHECKING, Protocol, cast, runtime_checkable

import numpy as np
import torch

from kvtrie.at_exit import end_at_exit
from kvtrie.errors import ConfigError, KvtrieError, TransferError
from kvtrie.tiers import DiskStorage, GroupDisk, GroupPools, HasBlockFormat, KeptPool, Pool, agree
from kvtrie.tiers.failure_log import FailureLog
from kvtrie.transfer.addresses import misaddressed
from kvtrie.transfer.job import Job, Urgency, group, run_together, takes_deadline
from kvtrie.transfer.job_state import JobState
from kvtrie.transfer.report import MoveReport, Progress
from kvtrie.transfer.schedule import Schedule
from kvtrie.transfer.section import Section

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from types import TracebackType
    from typing import Self

    from numpy.typing import NDArray

    from kvtrie import Moves
    from kvtrie.tier import Tier
    from kvtrie.tiers import TierBytes
    from kvtrie.transfer.report import Sink
    from kvtrie.transfer.section import Ticket

__all__ = ["Runner"]

_LOG = logging.getLogger(__name__)
_NS = 1_000_000_000
_MOST_FAILED = 1 << 16  # ids of failed moves, for later ones that name them as `after`
_WORKERS = 2  # threads of a storage of which no tier says how many
_SHARE = 8  # of host memory, for writes in flight to a remote tier
_MOST_UNSEALED = 64  # blocks of a kept pool; while more wait, a thread seals between two jobs
_DEPENDS = "the move that it waits for has failed"


@runtime_checkable
class _CountsDrops(Protocol):
    def count_dropped(self, blocks: int) -> None:
        """Count blocks that were evicted before the store had them."""


class Runner:
    """Threads that copy what moves say, between the pools of one process.

    A move may name as `after` another one that this runner has or has had. With several ranks,
    submit a move only when its `after` has ended well on all of them.
    One that is dropped without `close` cancels what has not started, and its threads end. It
    belongs to the process that made it: in a fork every call is a `ConfigError`.

    Args:
        pools: a `Pool`, a `Storage` or, where groups of layers are kept apart, a `GroupPools` or
            `GroupDisk` per tier, in the manager's order; None for a tier whose bytes are not in
            this process.
        tiers: the manager's tiers, for their `io_budget` and their names; without them nothing is
            limited.
        workers: threads that copy between pools; on a GPU each has a separate copy stream. Each
            storage has `Tier.workers` threads more. With 0, one thread carries out all jobs, and
            only during a call that waits.
        deadline_s: seconds that a job may run before its moves are reported failed. None waits for
            ever.
        clock: nanoseconds, monotone.
        layers_per_report: layers that are copied between two reports of progress.
        moves_per_job: the most moves that are copied and reported together.
        progress: called from the worker's thread with every piece of news. The first exception that
            it raises is logged, the others are ignored.
        sink: takes the reports and gives more moves; None collects them for `reports`.

    Attributes:
        section: the lock of all that follows.
        schedule: jobs that wait and run.
        on_call: whether one thread copies, and only during a call that waits.
        claimed: by lease, loads that a layer-wise engine carries out itself and has not begun.
        threads: the workers.

    Raises:
        ConfigError: pools with different block formats, or a number out of range.
    """

    def __init__(
        self,
        pools: Sequence[TierBytes | None],
        *,
        tiers: Sequence[Tier] = (),
        workers: int = 2,
        deadline_s: float | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
        layers_per_report: int = 8,
        moves_per_job: int = 64,
        progress: Callable[[Progress], None] | None = None,
        sink: Sink | None = None,
    ) -> None:
        if workers < 0 or layers_per_report < 1 or moves_per_job < 1:
            raise ConfigError("workers is at least 0, layers and moves per report at least 1")
        if deadline_s is not None and deadline_s <= 0:
            raise ConfigError(f"a deadline of {deadline_s} s has passed before a move starts")
        memory = [isinstance(pool, Pool | GroupPools) for pool in pools]
        agree(
            (_name(at, tiers), pool.block_format, memory[at])
            for at, pool in enumerate(pools)
            if isinstance(pool, HasBlockFormat)
        )
        limits = _write_limits(pools, tiers)
        self.pools = tuple(pools)
        self.clock = clock
        self.deadline_ns = None if deadline_s is None else int(deadline_s * _NS)
        self.moves_per_job = moves_per_job
        self.section = Section()
        self.on_call = workers == 0
        self.schedule = Schedule(tiers, split=not self.on_call, limits=limits)
        self._remote = frozenset(
            at for at, tier in enumerate(tiers) if tier.kind == "remote" and not memory[at]
        )
        self.claimed: dict[int, list[Job]] = {}
        self._layers_per_report = layers_per_report
        self._progress = progress
        self._complained = False
        self._failures = FailureLog(_LOG, clock)
        self._places = [_place(at, tiers) for at in range(len(pools))]
        self._sink = sink
        self._outbox: list[MoveReport] = []
        self._failed: dict[int, None] = {}
        self._closed = False
        self._broken: BaseException | None = None
        devices = (pool.device for pool in self.pools if isinstance(pool, Pool | GroupPools))
        cuda = next((device for device in devices if device.type == "cuda"), None)
        parts = (pool.groups if isinstance(pool, GroupPools) else (pool,) for pool in self.pools)
        self._kept = [pool for part in parts for pool in part if isinstance(pool, KeptPool)]
        self._compute = None if cuda is None else torch.cuda.current_stream(cuda)
        self._given: list[Job] = []
        counts: dict[int | None, int] = {None: workers or 1}
        if not self.on_call:
            storages = [at for at, pool in enumerate(pools) if pool is not None and not memory[at]]
            counts |= {at: tiers[at].threads() if tiers else _WORKERS for at in storages}
        self.threads = [
            threading.Thread(
                target=_work,
                args=(weakref.ref(self), self._stream(), storage),
                name=f"kvtrie-{'transfer' if storage is None else f'tier{storage}'}-{index}",
                daemon=True,
            )
            for storage, count in counts.items()
            for index in range(count)
        ]
        self._threads_of = counts
        for thread in self.threads:
            thread.start()
            end_at_exit(thread, self._end_at_exit)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.section.here:  # a fork that leaves the block leaves its parent's threads alone
            self.close()

    def __del__(self) -> None:
        """Fail every move that is left: no thread of a dropped runner works for it."""
        # Missing where the arguments were refused.
        section: Section | None = getattr(self, "section", None)
        if section is None or not section.here or sys.is_finalizing():
            return
        self._progress = None
        self.shut("the runner was dropped")
        for job in list(self.schedule.running):
            self.end(job, "the runner was dropped", cancelled=True)

    def submit(self, moves: Moves) -> None:
        """Take moves in, and start them when they may.

        A move that no pool of this process can serve is reported failed, as is one whose `after`
        has failed here; an `after` that this runner has never had counts as ended well.

        Raises:
            ConfigError: a move that is here already, or twice in `moves`.
            TransferError: the runner is closed.
        """
        with self.section:
            self.check()
            ids = moves.id.tolist()
            again = self.schedule.unended(set(ids))
            if again or len(set(ids)) < len(ids):
                raise ConfigError(f"{len(ids)} moves, {len(again)} of them here already, or twice")
            why = misaddressed(moves, self.pools)
            for row, reason in why.items():
                self.report([ids[row]], error=reason)
            # In topological order, so one pass finds chains; most batches wait for nothing.
            for row in np.flatnonzero(moves.after).tolist():
                if row not in why and int(moves.after[row]) in self._failed:
                    why[row] = _DEPENDS
                    self.report([ids[row]], error=_DEPENDS, cancelled=True)
            self.accept(moves if not why else moves[np.delete(np.arange(len(moves)), [*why])])

    def reports(self, *, wait: bool = False) -> list[MoveReport]:
        """News since the last call, in the order in which it came.

        Args:
            wait: block until there is any, or until no move is left that could bring any.

        Raises:
            TransferError: a worker could not report.
        """
        if wait and not self._closed:
            self.until(
                lambda: bool(self._outbox) or self.schedule.left() == self.schedule.late(),
                "no move is left",
            )
        with self.section:
            if not self._closed:
                self.poll()
            news, self._outbox = self._outbox, []
            return news

    def drain(self) -> list[MoveReport]:
        """Block until every move has ended, but for those that hang; the news since the last call.

        Raises:
            TransferError: the runner is closed, or a worker could not report.
        """
        schedule = self.schedule
        self.until(lambda: schedule.left() == schedule.late(), "no move is left")
        return self.reports()

    @property
    def pending(self) -> int:
        """Moves that have not ended, those that hang included."""
        with self.section.lock:
            return self.schedule.left()

    @property
    def hangs(self) -> bool:
        """Whether all moves that have not ended hang."""
        with self.section.lock:
            return self.schedule.left() == self.schedule.late()

    def cancel(
        self,
        ids: Collection[int] | NDArray[np.uint64] | None = None,
        why: str = "cancelled",
        *,
        blame: bool = False,
    ) -> int:
        """Fail moves that have not started.

        Args:
            ids: which moves; None means all. Those that run, have ended or are unknown stay.
            why: the reason that is reported.
            blame: report them as failed instead of cancelled, so that they are not asked for again.

        Returns:
            How many moves will not run, those that waited for them included.
        """
        with self.section:
            gone, with_them = self.schedule.queue.cancel(ids)
            if gone:
                self.report(gone, error=why, cancelled=not blame)
                self._lose(with_them)
                self.section.notify_all()
            return len(gone) + len(with_them)

    def wake(self) -> None:
        """Have idle threads look again: blocks of a kept pool wait to be sealed."""
        with self.section:
            self.section.notify_all()

    def close(self) -> None:
        """Cancel the moves that have not started, let the running ones end, join the threads.

        A thread that hangs beyond the deadline is not joined. Closing twice does nothing.
        """
        self.shut("closed before the move started")
        while True:
            with self.section:
                self._expire()
                hanging = {job.worker for job in self.schedule.running}
                if all(job.state is JobState.LATE for job in self.schedule.running):
                    break
                ticket = self.section.ticket(self.patience())
            ticket.wait()
        for thread in self.threads:
            if thread not in hanging:
                thread.join()

    def _end_at_exit(self) -> None:
        if self.section.here:
            self.shut("the process ends")

    def shut(self, why: str) -> None:
        """Cancel what has not started; the threads end when they have nothing left to do."""
        with self.section:
            if not self._closed:
                self._closed = True
                self.cancel(None, why)
                self.section.notify_all()

    def check(self) -> None:
        """Raise if no move can be taken in any more.

        Raises:
            TransferError: the runner is closed, or a worker could not report.
        """
        if self._broken is not None:
            raise TransferError(f"a worker could not report: {self._broken}") from self._broken
        if self._closed:
            raise TransferError("the runner is closed")

    def poll(self, before: Callable[[], object] | None = None) -> bool:
        """From within the section: take moves in, and fail those past their deadline.

        Args:
            before: called first, if the runner is open.

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
        """Block until a condition holds; it is checked again after each change of a move.

        Args:
            done: the condition, called in the section.
            stuck: text of the error.
            before: called first each time, in the section.

        Raises:
            TransferError: with the text `stuck`, if no move is left that could bring it about.
        """
        while True:
            with self.section:
                news = self.poll(before)
                if done():
                    return
                if self.on_call:
                    self._give()
                if news:
                    continue
                if self.schedule.left() == self.schedule.late():
                    raise TransferError(stuck)
                ticket = self.section.ticket(self.patience())
            ticket.wait()

    def take(self) -> bool:
        """From within the section: accept moves of the sink; return whether there were any.

        The lock is held, so no completion can slip in between.
        """
        if self._sink is None or self._closed or self._broken is not None:
            return False
        moves = self._sink.more()
        if not len(moves):
            return False
        self.accept(moves)
        while self._refuse_awaited_stores() and len(moves := self._sink.more()):
            self.accept(moves)
        return True

    def accept(self, moves: Moves) -> None:
        """From within the section: queue moves whose tiers and slots the pools have."""
        event = self._compute.record_event() if self._compute is not None else None
        schedule, claimed = self.schedule, self.claimed
        pools = cast("Sequence[TierBytes]", self.pools)  # those of the moves are here
        for job in group(moves, pools, schedule.unended, self.moves_per_job, claimed):
            job.event = event
            schedule.queue.add(job)
            if job.lease:
                claimed[job.lease].append(job)
        self.section.notify_all()

    def _refuse_awaited_stores(self) -> bool:
        """Fail stores to a remote tier for whose slots others wait; whether there were any.

        The manager then drops the block: a shared store may take any time.
        """
        queue = self.schedule.queue
        awaited: dict[int, list[int]] = {}
        for job in queue if self._remote else ():
            remote = job.store and job.tiers[1] in self._remote
            if remote and (job.urgency < Urgency.BACKGROUND or queue.awaited(job.ids)):
                awaited.setdefault(job.tiers[1], []).extend(job.ids.tolist())
        for tier, ids in awaited.items():
            if isinstance(pool := self.pools[tier], _CountsDrops):
                pool.count_dropped(len(ids))
            self.cancel(ids, "eviction does not wait for a shared store", blame=True)
        return bool(awaited)

    def attend(self, stream: torch.cuda.Stream | None, storage: int | None = None) -> Ticket | None:
        """Carry out, as one of the threads, the jobs that may start.

        Args:
            stream: the thread's copy stream on a GPU.
            storage: the storage whose jobs it carries out; None for copies between pools.

        Returns:
            The ticket to wait for before there may be more; None if there never will be.
        """
        worker = threading.current_thread()
        while True:
            with self.section:
                self._expire()
                jobs, self._given = self._given, []
                if not self.on_call:
                    jobs = self._next(worker, storage)
                if not jobs and not any(pool.sealable for pool in self._kept):
                    if self._closed or self._broken is not None:
                        return None
                    return self.section.ticket(self.patience())
            if jobs:
                self._carry_out(jobs, stream)
            self._seal(_MOST_UNSEALED if jobs else 0)

    def end(self, job: Job, error: str | None = None, *, cancelled: bool = False) -> None:
        """Report the end of a running job and start the jobs that waited for it.

        Args:
            job: the job.
            error: why it failed; None if it ended well.
            cancelled: its lease gave it up: neither source nor destination is to blame.
        """
        with self.section:
            self.schedule.running.remove(job)
            self.schedule.queue.done(job)
            late = job.state is JobState.LATE
            job.go(JobState.EXPIRED if late else JobState.ENDED)
            if late:
                error = "the move ended past its deadline"
            # A claimed job has reported each of its layers to the sink.
            if self._sink is not None and not job.lease:
                brought = job.bytes if error is None else 0
                self._sink.ended(job, self.clock(), brought=brought)
            job.settle(ok=error is None)
            self.report(job.ids, error=error, cancelled=cancelled and not late)
            self._release(job.ids, ok=error is None)
            try:
                self.take()
            except Exception as broken:  # noqa: BLE001 - raised to the caller that waits
                self._break(broken)
            self.section.notify_all()
        if error is not None and not (cancelled or late):
            self._warn(job, error)
        layers = job.layers[1] - job.layers[0]
        self.report_progress(job.ids, layers if error is None else 0, layers, error)

    def _warn(self, job: Job, error: str) -> None:
        """Log the failure of a store, once per reason."""
        target = job.tiers[1]
        pool = self.pools[target]
        # These log it themselves: a shared store, and a folder in which nothing is written.
        logs = target in self._remote or (
            isinstance(pool, DiskStorage | GroupDisk) and pool.read_only
        )
        if job.store and not logs:
            self._failures.warn(self._places[target], f"a block is not stored: {error}")

    def report(
        self,
        ids: Sequence[int] | NDArray[np.uint64],
        *,
        layers_done: int | None = None,
        error: str | None = None,
        hung: bool = False,
        cancelled: bool = False,
    ) -> None:
        """Pass a report on to the sink, or keep it for `reports`; call it in the section.

        Args:
            ids: the moves.
            layers_done: number of layers that have arrived, for moves that still run.
            error: why the moves failed; None if they did not.
            hung: they passed the deadline and still run.
            cancelled: they failed and never started.
        """
        if not len(ids):
            return
        if self._sink is None:
            each = tuple(map(int, ids))
            self._outbox.append(MoveReport(each, layers_done, error, hung, cancelled))
            if error is not None:
                self._remember(each)
            return
        try:
            self._sink.report(
                ids,
                self.clock(),
                layers_done=layers_done,
                error=error,
                hung=hung,
                cancelled=cancelled,
            )
        except Exception as broken:  # noqa: BLE001 - raised to the caller that waits
            self._break(broken)

    def report_progress(
        self,
        ids: Sequence[int] | NDArray[np.uint64],
        layers_done: int,
        layers: int,
        error: str | None,
    ) -> None:
        """Call the progress callback; not in the section, as the callback may take long.

        Args:
            ids: the moves.
            layers_done: number of layers copied.
            layers: number of layers of each move.
            error: why they failed; None if they did not.
        """
        if self._progress is None or not len(ids):
            return
        each, left = tuple(map(int, ids)), self.schedule.left()
        try:
            self._progress(Progress(each, layers_done, layers, error, left))
        except BaseException as raised:
            own = threading.current_thread() in self.threads
            if not isinstance(raised, Exception) and not own:
                raise  # Ctrl-C is the caller's
            if not self._complained:
                self._complained = True
                _LOG.warning(
                    "the progress callback raised, moves go on: %s", raised, exc_info=raised
                )

    def patience(self) -> float | None:
        """Seconds until a deadline passes or a budget lets a job start; None for neither."""
        return self.schedule.patience(self.deadline_ns, self.clock())

    def _stream(self) -> torch.cuda.Stream | None:
        """A thread's copy stream on a GPU: its own, or the caller's where it copies on call."""
        compute = self._compute
        return compute if compute is None or self.on_call else torch.cuda.Stream(compute.device)

    def _give(self) -> None:
        """With `workers=0`: hand the next jobs to the thread, if it has nothing to do.

        The caller only waits, so that Ctrl-C does not stop a copy half-way.
        """
        (thread,) = self.threads
        if not any(job.worker is thread for job in self.schedule.running):
            self._given = self._next(thread)
            self.section.notify_all()

    def _next(self, worker: threading.Thread, storage: int | None = None) -> list[Job]:
        now = self.clock()
        jobs = self.schedule.next(worker, self.moves_per_job, now, storage)
        if self._sink is not None:
            for job in jobs:
                self._sink.began(job, now)
        return jobs

    def _carry_out(self, jobs: Sequence[Job], stream: torch.cuda.Stream | None) -> None:
        job = jobs[0]
        storage = job.target if job.store else job.source
        if len(jobs) > 1 or (job.batchable and takes_deadline(storage)):
            self._carry_out_together(jobs)
            return
        try:
            self.admit(job)
            with torch.cuda.stream(stream) if stream is not None else nullcontext():
                if stream is not None and job.event is not None:
                    stream.wait_event(job.event)
                for done in job.run(self._layers_per_report) if self._reads(job) else ():
                    if stream is not None:
                        stream.synchronize()
                    if done < job.layers[1] - job.layers[0]:
                        self._advance(job, done)
        except BaseException as caught:  # noqa: BLE001 - whatever a tier raises fails its moves
            self.end(job, f"{type(caught).__name__}: {caught}")
        else:
            self.end(job)

    def _carry_out_together(self, jobs: Sequence[Job]) -> None:
        kind = TransferError.__name__
        for job in jobs:
            self.admit(job)
            if not self._reads(job):
                self.end(job)
        jobs = [job for job in jobs if not job.over]
        try:
            errors = run_together(jobs, self._deadline(jobs[0])) if jobs else []
        except BaseException as caught:  # noqa: BLE001 - whatever a tier raises fails its moves
            errors, kind = [str(caught)] * len(jobs), type(caught).__name__
        for job, why in zip(jobs, errors, strict=True):
            self.end(job, None if why is None else f"{kind}: {why}")

    def _reads(self, job: Job) -> bool:
        """Copy the source of an admitted job where its slot may get another holder.

        Returns:
            Whether there is anything left to do: a move is, and none was reported failed so far.
        """
        if not len(job.ids):
            return False
        job.copy_source()
        with self.section.lock:
            return job.state is not JobState.LATE

    def _deadline(self, job: Job) -> int | None:
        """When a running job is past its deadline, in nanoseconds of the monotonic clock."""
        if self.deadline_ns is None:
            return None
        return time.monotonic_ns() + job.started_ns + self.deadline_ns - self.clock()

    def admit(self, job: Job) -> None:
        """Prove and mark the blocks of a running job in kept pools, before its first copy.

        Moves of blocks that cannot be used leave the job, and are reported failed.
        """
        self.fail(job, job.prove())
        self.fail(job, job.mark())

    def fail(self, job: Job, failed: Mapping[int, str]) -> list[str]:
        """Report moves of a running job failed, which leave it; return why."""
        for ident, why in failed.items():
            error = f"{TransferError.__name__}: {why}"
            ids = np.array([ident], dtype=np.uint64)
            with self.section:
                job.drop(ident)
                self.report(ids, error=error)
                self._release(ids, ok=False)
                self.section.notify_all()
            self._warn(job, error)
            self.report_progress(ids, 0, job.layers[1] - job.layers[0], error)
        return [*failed.values()]

    def _seal(self, most: int) -> None:
        """Seal blocks of kept pools, until at most this many wait or, if it is 0, one batch."""
        for pool in self._kept:
            try:
                while pool.unsealed > most and pool.seal() and most:
                    pass
            except KvtrieError as error:
                why = f"blocks are not kept for the next process: {error}"
                self._failures.warn(pool.file.path, why)

    def _advance(self, job: Job, layers_done: int) -> None:
        """Report the layers that a running job has copied so far."""
        with self.section:
            late = job.state is JobState.LATE
            if not late:
                job.there = job.layers[0] + layers_done
                self.report(job.ids, layers_done=layers_done)
                self.section.notify_all()
        if not late:
            self.report_progress(job.ids, layers_done, job.layers[1] - job.layers[0], None)

    def _release(self, ids: NDArray[np.uint64], *, ok: bool) -> None:
        """Start the jobs that waited for moves that ended well; drop those of failed ones."""
        for ident in self.schedule.queue.awaited(ids):
            self._lose(self.schedule.queue.ended(ident, ok=ok))

    def _lose(self, ids: list[int]) -> None:
        """Report moves that left the queue with the one they waited for."""
        # A manager has failed them itself, with the move that they name.
        if ids and self._sink is None:
            self.report(ids, error=_DEPENDS, cancelled=True)

    def _remember(self, ids: tuple[int, ...]) -> None:
        self._failed.update(dict.fromkeys(ids))
        while len(self._failed) > _MOST_FAILED:
            del self._failed[next(iter(self._failed))]

    def _give_up(self) -> bool:
        """Cancel the moves that hanging jobs keep from starting; return whether there were any.

        Those are the moves that wait for the same slot of a storage and, while every thread of a
        storage hangs, or every thread that copies between pools, all moves that wait for it.
        """
        queue = self.schedule.queue
        hung = [job for job in self.schedule.running if job.state is JobState.LATE]
        if not hung:
            return False
        blocked = [ident for job in hung for ident in queue.blocked_by(job)]
        gone = self.cancel(blocked, "the move before it at its place hangs")
        for storage, count in self._threads_of.items():
            late = [job for job in hung if self.on_call or job.storage == storage]
            if len({job.worker for job in late} - {None}) < count:
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
            gone += self.cancel(awaited, why, blame=True)
            gone += self.cancel([ident for job in waiting for ident in job.ids.tolist()], why)
        return gone > 0

    def _expire(self) -> bool:
        """Report jobs past their deadline as failed; return whether there were any."""
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
            self._warn(job, why)
            self._release(job.ids, ok=False)
            self.section.notify_all()
        return found

    def _break(self, broken: BaseException) -> None:
        self._broken = broken
        self.section.notify_all()


def _name(at: int, tiers: Sequence[Tier]) -> str:
    return f"tier {at} ({tiers[at].kind})" if at < len(tiers) else f"tier {at}"


def _place(at: int, tiers: Sequence[Tier]) -> str:
    path = (tiers[at].path or tiers[at].keep) if at < len(tiers) else None
    return _name(at, tiers) if path is None else f"{_name(at, tiers)} in {path}"


def _write_limits(pools: Sequence[TierBytes | None], tiers: Sequence[Tier]) -> dict[int, int]:
    """Most bytes of writes in flight by remote tier, by default an eighth of host memory.

    Raises:
        ConfigError: a limit below one block.
    """
    limits: dict[int, int] = {}
    memory = [pool for pool in pools if isinstance(pool, Pool) and pool.device.type == "cpu"]
    for at, tier in enumerate(tiers):
        if tier.kind != "remote" or not memory:
            continue
        host = memory[-1]
        block = host.layers * host.unit_bytes
        limit = int(tier.write_limit or max(block, host.blocks * block // _SHARE))
        if limit < block:
            raise ConfigError(f"write_limit is {limit} bytes, at least one block of {block} wanted")
        limits[at] = limit
    return limits


def _work(ref: weakref.ref[Runner], stream: torch.cuda.Stream | None, storage: int | None) -> None:
    """A thread's loop: it refers to its runner only while it works, so that one may be dropped."""
    while (runner := ref()) is not None:
        ticket = runner.attend(stream, storage)
        del runner
        if ticket is None:
            return
        ticket.wait()
