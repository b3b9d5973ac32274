"""Runner: the queue of a manager's moves, the threads that carry them out, and their reports.

Invariants: a move starts only after its `after` has ended well; every move handed out is reported
exactly once as done or failed; what still runs when it is reported failed is reported again when
it ends, and its slots stay untouched until then; nobody waits for a device that hangs longer than
the deadline; no store that nobody waits for starts while a load that somebody waits for runs.
Cost: one lock, held for bookkeeping and calls into the manager (microseconds), never for a copy.
"""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvtrie.errors import ClosedError, ConfigError, TransferError
from kvtrie.tiers import BlockFormat, HasBlockFormat, Pool, agree
from kvtrie.transfer.budget import Budget
from kvtrie.transfer.feedback import Feedback
from kvtrie.transfer.job import Job, Urgency, group, run_together
from kvtrie.transfer.queue import Queue
from kvtrie.transfer.section import Section

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from kvtrie import BlockManager, Moves
    from kvtrie.tiers import Storage
    from kvtrie.transfer.section import Ticket

__all__ = ["Progress", "Runner"]

_LOG = logging.getLogger(__name__)
_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Progress:
    """How far some moves are, as `Executor` tells it.

    Attributes:
        ids: the moves, which are equally far.
        layers_done: layers that are copied, the first ones of each.
        layers: layers of each move.
        error: why they failed; None while all is well.
        pending: moves of the executor that have not ended.
    """

    ids: tuple[int, ...]
    layers_done: int
    layers: int
    error: str | None
    pending: int


class Runner:
    """What an `Executor` stands on: its arguments are explained there."""

    def __init__(
        self,
        manager: BlockManager,
        pools: Sequence[Pool | Storage | None],
        *,
        workers: int,
        deadline_s: float | None,
        clock: Callable[[], int],
        layers_per_report: int,
        moves_per_job: int,
        progress: Callable[[Progress], None] | None,
        learn: bool,
    ) -> None:
        given = [pool for pool in pools if pool is not None]
        if len(given) != len(manager.tiers):
            raise ConfigError(f"{len(given)} pools given for {len(manager.tiers)} tiers")
        if workers < 0 or layers_per_report < 1 or moves_per_job < 1:
            raise ConfigError("workers is at least 0, layers and moves per report at least 1")
        if deadline_s is not None and deadline_s <= 0:
            raise ConfigError(f"a deadline of {deadline_s} s has passed before a move starts")
        self.manager = manager
        self.pools = tuple(given)
        self._look()
        self.clock = clock
        self._deadline_ns = None if deadline_s is None else int(deadline_s * _NS)
        self._layers_per_report = layers_per_report
        self._moves_per_job = moves_per_job
        self._tell = progress
        self._complained = False
        self._queue = Queue()
        self._budget = Budget(manager.tiers)
        self.feedback = Feedback(manager, learn=learn)
        self._claimed: dict[int, list[Job]] = {}
        self._running: list[Job] = []
        self._closed = False
        self._broken: BaseException | None = None
        devices = (pool.device for pool in self.pools if isinstance(pool, Pool))
        cuda = next((device for device in devices if device.type == "cuda"), None)
        self._compute = None if cuda is None else torch.cuda.current_stream(cuda)
        self._on_call = workers == 0
        self._given: list[Job] = []
        self._section = Section()
        self._threads = [
            threading.Thread(
                target=_work,
                args=(weakref.ref(self), self._stream()),
                name=f"kvtrie-transfer-{index}",
                daemon=True,
            )
            for index in range(workers or 1)
        ]
        for thread in self._threads:
            thread.start()

    def __del__(self) -> None:
        """What nobody refers to any more holds nothing: whoever works for it refers to it."""
        section: Section | None = getattr(self, "_section", None)  # its settings may be refused
        if section is None or not section.here or sys.is_finalizing():
            return
        self._tell = None
        self._shut("the executor is gone")
        for job in list(self._running):
            self._end(job, "the executor is gone", cancelled=True)

    def _shut(self, why: str) -> None:
        """Cancel what has not started; the threads end when they have nothing left to do."""
        with self._section:
            if not self._closed:
                self._closed = True
                self._cancel(None, why)
                self._section.notify_all()

    def _stream(self) -> torch.cuda.Stream | None:
        """What a thread copies on: on a GPU a stream of its own, or the caller's on call."""
        compute = self._compute
        return compute if compute is None or self._on_call else torch.cuda.Stream(compute.device)

    def _look(self) -> None:
        """Whether the pools may exchange bytes, and are of the manager's blocks."""
        model, size = self.manager.model, self.manager.block_tokens
        memory = [isinstance(pool, Pool) for pool in self.pools]
        formats = [
            (f"tier {at} ({tier.kind})", pool.block_format, memory[at])
            for at, (tier, pool) in enumerate(zip(self.manager.tiers, self.pools, strict=True))
            if isinstance(pool, HasBlockFormat)
        ]
        for name, block_format, _ in formats[:1]:
            managed = BlockFormat.first(model, block_format.layout, size)
            agree([("the manager", managed, False), (name, block_format, False)])
        agree(formats)

    def _until(self, done: Callable[[], bool], stuck: str) -> None:
        while True:
            with self._section:
                news = self._poll()
                if done():
                    return
                if self._on_call:
                    self._give()
                if news:
                    continue
                if self._left() == self._late():
                    raise TransferError(stuck)
                ticket = self._section.ticket(self._patience())
            ticket.wait()

    def _give(self) -> None:
        """With `workers=0`: what comes next is for the thread, if that has nothing to do.

        The caller only waits: what interrupts it does not stop a copy half-way.
        """
        (thread,) = self._threads
        if not any(job.worker is thread for job in self._running):
            self._given = self._next(thread)
            self._section.notify_all()

    def _poll(self) -> bool:
        """Look after everything; tells whether there was anything to do."""
        if self._broken is not None:
            raise TransferError(f"a worker could not report: {self._broken}") from self._broken
        if self._closed:
            raise TransferError("the executor is closed")
        for lease in [lease for lease, jobs in self._claimed.items() if jobs]:
            try:
                self.manager.lease(lease)
            except ClosedError:  # released before anybody retrieved it
                self._disclaim(lease)
        return any([self._expire(), self._take(), self._give_up()])

    def _disclaim(self, lease: int) -> None:
        """Carry out the loads of a lease that nobody has claimed like anybody's."""
        for job in self._claimed.pop(lease, ()):
            self._queue.hand_over(job)
        self._section.notify_all()

    def _take(self) -> bool:
        """Accept what the manager hands out. The lock is held: no completion can slip between."""
        if self._closed or self._broken is not None:
            return False
        moves = self.manager.moves()
        if not len(moves):
            return False
        self._accept(moves)
        return True

    def _accept(self, moves: Moves) -> None:
        event = self._compute.record_event() if self._compute is not None else None
        jobs = group(moves, self.pools, self._unended, self._moves_per_job, self._claimed)
        for job in jobs:
            job.event = event
            self._queue.add(job)
            if job.lease:
                self._claimed[job.lease].append(job)
        self._section.notify_all()

    def _next(self, worker: threading.Thread | None) -> list[Job]:
        """The jobs to carry out next: one, or several that go in one call of their storage."""
        jobs: list[Job] = []
        job = self._queue.pop(self._may)
        while job is not None:
            jobs.append(job)
            job.started_ns = self.clock()
            job.worker = worker
            self._running.append(job)
            if job.urgency != Urgency.DEMAND:
                self._budget.spend(job, self.clock())
            self.feedback.began(job, job.started_ns)
            more = len(jobs) < self._moves_per_job and jobs[0].batchable
            job = self._queue.pop(self._may, jobs[0]) if more else None
        return jobs

    def _may(self, job: Job) -> bool:
        """Whether a job may start now."""
        if job.urgency == Urgency.DEMAND:
            return True
        if job.store and self._loading():
            return False
        return self._budget.free_at(job) <= self.clock()

    def _loading(self) -> bool:
        """Whether a load copies that a lease waits for."""
        return any(
            job.urgency == Urgency.DEMAND
            and not job.store
            and not job.failed
            and job.started_ns is not None
            for job in self._running
        )

    def attend(self, stream: torch.cuda.Stream | None) -> Ticket | None:
        """Carry out, as one of the threads, what there is to do.

        Returns:
            What to wait for before there may be more; None if there never will be.
        """
        worker = threading.current_thread()
        while True:
            with self._section:
                self._expire()
                jobs, self._given = self._given, []
                if not self._on_call:
                    jobs = self._next(worker)
                if not jobs:
                    if self._closed or self._broken is not None:
                        return None
                    return self._section.ticket(self._patience())
            self._carry_out(jobs, stream)

    def _carry_out(self, jobs: Sequence[Job], stream: torch.cuda.Stream | None) -> None:
        if len(jobs) > 1:
            self._carry_out_together(jobs)
            return
        job = jobs[0]
        try:
            with torch.cuda.stream(stream) if stream is not None else nullcontext():
                if stream is not None and job.event is not None:
                    stream.wait_event(job.event)
                for done in job.run(self._layers_per_report):
                    if stream is not None:
                        stream.synchronize()
                    if done < job.layers[1] - job.layers[0]:
                        self._progress(job, done)
        except BaseException as caught:  # noqa: BLE001 - whatever a tier raises fails its moves
            self._end(job, f"{type(caught).__name__}: {caught}")
        else:
            self._end(job, None)

    def _carry_out_together(self, jobs: Sequence[Job]) -> None:
        kind = TransferError.__name__
        try:
            told = run_together(jobs)
        except BaseException as caught:  # noqa: BLE001 - whatever a tier raises fails its moves
            told, kind = [str(caught)] * len(jobs), type(caught).__name__
        for job, why in zip(jobs, told, strict=True):
            self._end(job, None if why is None else f"{kind}: {why}")

    def _progress(self, job: Job, layers_done: int) -> None:
        with self._section:
            late = job.failed
            if not late:
                job.there = job.layers[0] + layers_done
                self._report(job.ids, layers_done=layers_done)
                self._section.notify_all()
        if not late:
            self._told(job.ids, layers_done, job.layers[1] - job.layers[0], None)

    def _end(self, job: Job, error: str | None, *, cancelled: bool = False) -> None:
        with self._section:
            self._running.remove(job)
            self._queue.done(job)
            job.over = True
            if job.failed:
                error = "the move ended past its deadline"
            if not job.lease:
                self.feedback.ended(job, self.clock(), brought=job.bytes if error is None else 0)
            self._report(job.ids, error=error, cancelled=cancelled and not job.failed)
            self._release(job.ids, ok=error is None)
            try:
                self._take()
            except Exception as broken:  # noqa: BLE001 - told to whoever waits
                self._break(broken)
            self._section.notify_all()
        layers = job.layers[1] - job.layers[0]
        self._told(job.ids, layers if error is None else 0, layers, error)

    def _release(self, ids: NDArray[np.uint64], *, ok: bool) -> None:
        """Start what waited for moves that ended well; forget what waited for failed ones."""
        for ident in self._queue.awaited(ids):
            self._queue.ended(ident, ok=ok)

    def _cancel(
        self,
        ids: Collection[int] | NDArray[np.uint64] | None,
        why: str,
        *,
        blame: bool = False,
    ) -> int:
        gone, with_them = self._queue.cancel(ids)
        if gone:
            self._report(gone, error=why, cancelled=not blame)
            self._section.notify_all()
        return len(gone) + len(with_them)

    def _give_up(self) -> bool:
        """Cancel what moves that hang keep from starting; tells whether there was any.

        That is what stands behind them at a storage and, while every worker hangs, everything. A
        store whose end somebody waits for is blamed then: the manager would only ask for another
        block's in its place, and then for that of the first again, without end.
        """
        hung = [job for job in self._running if job.failed]
        behind = [ident for job in hung for ident in self._queue.behind(job)]
        gone = self._cancel(behind, "the move before it at its place hangs")
        if len({job.worker for job in hung} - {None}) == len(self._threads):
            awaited = [
                ident
                for job in self._queue
                if job.store and job.urgency == Urgency.DEMAND
                for ident in job.ids.tolist()
            ]
            why = "every worker hangs"
            gone += self._cancel(awaited, why, blame=True) + self._cancel(None, why)
        return gone > 0

    def _expire(self) -> bool:
        """Report failed what runs past its deadline; tells whether there was any."""
        if self._deadline_ns is None:
            return False
        now, before = self.clock(), self._late()
        for job in self._running:
            started = job.started_ns
            if job.failed or started is None or now - started < self._deadline_ns:
                continue
            job.failed = True
            self._report(job.ids, error=f"no end after {(now - started) / _NS:.3f} s", hung=True)
            self._release(job.ids, ok=False)
            self._section.notify_all()
        return self._late() > before

    def _left(self) -> int:
        """Moves that have not ended."""
        return len(self._queue) + sum(len(job.ids) for job in self._running)

    def _unended(self, ids: set[int]) -> set[int]:
        """Those of some moves that have not ended."""
        left = {ident for ident in ids if self._queue.job_of(ident)}
        return left.union(*(ids.intersection(job.ids.tolist()) for job in self._running))

    def _late(self) -> int:
        """Moves that still run though they were reported failed."""
        return sum(len(job.ids) for job in self._running if job.failed)

    def _patience(self) -> float | None:
        """Seconds until a deadline or until a budget lets something start; None for neither."""
        now = self.clock()
        # What has not begun may do so at once, and wakes nobody for that.
        starts = [job.started_ns or now for job in self._running if not job.failed]
        starts += [now] if self._queue else []
        times = [self._budget.free_at(job) for job in self._queue] if self._budget.limited else []
        times = [time for time in times if time > now]
        if self._deadline_ns is not None and starts:
            times.append(min(starts) + self._deadline_ns)
        return max(0.0, (min(times) - now) / _NS) if times else None

    def _report(
        self,
        ids: Sequence[int] | NDArray[np.uint64],
        *,
        layers_done: int | None = None,
        error: str | None = None,
        hung: bool = False,
        cancelled: bool = False,
    ) -> None:
        try:
            self.manager.complete(
                ids,
                now=self.clock(),
                ok=error is None,
                layers_done=layers_done,
                error=error,
                hung=hung,
                cancelled=cancelled,
            )
        except Exception as broken:  # noqa: BLE001 - told to whoever waits, also across threads
            self._break(broken)

    def _told(
        self,
        ids: Sequence[int] | NDArray[np.uint64],
        layers_done: int,
        layers: int,
        error: str | None,
    ) -> None:
        """Tell the caller, outside the section: what it does with the news is its own time."""
        if self._tell is None or not len(ids):
            return
        try:
            self._tell(Progress(tuple(map(int, ids)), layers_done, layers, error, self._left()))
        except BaseException as raised:
            if not isinstance(raised, Exception) and not self._own_thread():
                raise  # Ctrl-C is the caller's
            if not self._complained:
                self._complained = True
                _LOG.warning("progress could not be told, moves go on: %s", raised, exc_info=raised)

    def _own_thread(self) -> bool:
        return threading.current_thread() in self._threads

    def _break(self, broken: BaseException) -> None:
        self._broken = broken
        self._section.notify_all()


def _work(ref: weakref.ref[Runner], stream: torch.cuda.Stream | None) -> None:
    """A thread: it refers to its runner only while it works, so that one may simply be dropped."""
    while (runner := ref()) is not None:
        ticket = runner.attend(stream)
        del runner
        if ticket is None:
            return
        ticket.wait()
