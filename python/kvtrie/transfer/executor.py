"""Executor: takes a manager's moves, copies the bytes on worker threads, reports completion.

Invariants: a move starts only after its `after` has ended well; every move handed out is reported
exactly once as done or failed; what still runs when it is reported failed is reported again when
it ends, and its slots stay untouched until then; nobody waits for a device that hangs longer than
the deadline; no store that nobody waits for starts while a load that somebody waits for runs.
Cost: one lock, held for bookkeeping and calls into the manager (microseconds), never for a copy.
"""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvtrie.errors import ClosedError, ConfigError, TransferError
from kvtrie.tiers import Form, Formed, Lasting, Pool, agree
from kvtrie.transfer.budget import Budget
from kvtrie.transfer.errand import Errand
from kvtrie.transfer.feedback import Feedback
from kvtrie.transfer.job import Job, Urgency, group
from kvtrie.transfer.queue import Queue

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence
    from types import TracebackType
    from typing import Any, Self

    from kvtrie import BlockManager, Committed, Lease
    from kvtrie.tiers import Storage

__all__ = ["Executor", "Progress"]

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


class Executor:
    """Runs the moves of one manager.

    What leases wait for comes first, then loads that nobody waits for, then stores. What nobody
    waits for keeps to the `io_budget` of both its tiers, and such stores wait while loads run that
    somebody waits for: both directions at once cost each of them 18 to 20 % on PCIe (Pensieve,
    section 4.3.2).

    With `workers=0` there are no threads: `wait` and `drain` copy in the calling thread, in the
    manager's order, which makes a run repeatable.

    Args:
        manager: whose moves to run.
        pools: a `Pool` or a `Storage` per tier, in the manager's order: what `open_pools` gave,
            with the places of disk and remote tiers filled in.
        workers: threads; on a GPU each has a copy stream of its own.
        deadline_s: seconds that a job may run before its moves are reported failed; what it
            holds stays out of use until it ends. While all workers hang, nothing else starts and
            what waits is cancelled. So long may a tier also take in `save`. None waits for ever.
        clock: nanoseconds, monotone; also the `now` of every report.
        layers_per_report: layers that are copied between two reports of progress.
        moves_per_job: the most moves that are copied and reported together.
        progress: called from the worker's thread whenever moves get further or end, well or not;
            those that were reported failed at their deadline, when they end.
        learn: give each lane the bandwidth and latency that its copies show, from then on.

    Attributes:
        feedback: what the lanes were seen to do.

    Raises:
        ConfigError: pools that do not match the manager's tiers, or whose bytes lie differently
            from each other's (a storage that has no `form` is not asked), or numbers that cannot
            be.
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
        self._changed = threading.Condition()
        self._tell = progress
        self._queue = Queue()
        self._budget = Budget(manager.tiers)
        self._unhurried = True
        self.feedback = Feedback(manager, learn=learn)
        self._pending: set[int] = set()
        self._apart: dict[int, list[Job]] = {}
        self._layers: dict[int, int] = {}
        self._closing: list[Callable[[], None]] = []
        self._running: list[Job] = []
        self._errands: dict[int, Errand] = {}
        self._closed = False
        self._broken: BaseException | None = None
        devices = (pool.device for pool in self.pools if isinstance(pool, Pool))
        cuda = next((device for device in devices if device.type == "cuda"), None)
        self._compute = None if cuda is None else torch.cuda.current_stream(cuda)
        self._threads = [
            threading.Thread(target=self._work, name=f"kvtrie-transfer-{index}", daemon=True)
            for index in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def poll(self) -> int:
        """Hand new moves to the workers and fail those past their deadline; never blocks.

        Engines call it after whatever may have caused moves (acquire, commit, release).

        Returns:
            The number of moves that have not ended.

        Raises:
            TransferError: the executor is closed, or a worker could not report.
        """
        with self._changed:
            self._poll()
            return len(self._pending)

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
        for lease in list(self._apart):
            self.disclaim(lease)
        self._until(
            lambda: len(self._pending) == self._late(), "moves are left that nobody can carry out"
        )

    def cancel(self, ids: Collection[int] | None = None) -> int:
        """Fail moves that have not started, which blames nobody: they can be asked for again.

        Args:
            ids: which moves; None means all. Those that run, have ended or are unknown are left
                alone.

        Returns:
            How many moves will not run, those that waited for them included.
        """
        with self._changed:
            self._take()
            return self._cancel(ids, "cancelled")

    def flush(self) -> None:
        """Copy down what stands only above, as far as there is room, and wait for it.

        Afterwards a tier that outlives the process holds whole prefixes; see `save`.
        """
        self._unhurried = False  # the caller waits for these stores
        try:
            # A tier empties into the next one while that one is still being written: twice each.
            for _ in range(2 * len(self.pools)):
                self.drain()
                if not self.manager.flush(now=self.clock()):
                    break
            self.drain()
        finally:
            self._unhurried = True

    def save(self) -> None:
        """Flush, and let every lasting tier write down what it holds now, with ages and uses.

        Raises:
            TransferError: a tier did not write it down, or not within the deadline. What it wrote
                down before is found again all the same.
        """
        self.flush()
        for tier, pool in enumerate(self.pools):
            if isinstance(pool, Lasting):
                self._keep(tier, pool)

    def restore(self) -> int:
        """Find again what lasting tiers kept; before the first request.

        Returns:
            How many blocks are there again.
        """
        now = self.clock()
        return sum(
            self.manager.load_index(pool.recall(), tier, now=now)
            for tier, pool in enumerate(self.pools)
            if isinstance(pool, Lasting)
        )

    def close(self) -> None:
        """Cancel the moves that have not started, let the running ones end, join the threads.

        A thread that hangs beyond the deadline is left behind. Closing twice does nothing.
        """
        for close in self._closing:
            close()
        with self._changed:
            if not self._closed:
                self._closed = True
                self._cancel(None, "the executor was closed before the move started")
                self._changed.notify_all()
            while any(not job.failed for job in self._running):
                self._changed.wait(self._patience())
                self._expire()
            hanging = {job.worker for job in self._running}
        for thread in self._threads:
            if thread not in hanging:
                thread.join()

    def apart(self, action: Callable[[], Lease]) -> Lease:
        """Make a lease, and leave its loads to who asks for them by `claim`.

        Args:
            action: acquires or resumes it.
        """
        with self._changed:
            self._poll()
            lease = action()
            self._apart[lease.id] = []
            self._take()
            return lease

    def claimable(self, lease: int) -> bool:
        """Whether `claim` has something to give."""
        with self._changed:
            return bool(self._apart.get(lease))

    def claim(self, lease: int) -> list[Job]:
        """The loads of a lease apart that have been handed out since the last call."""
        with self._changed:
            self._take()
            jobs = self._apart.get(lease, [])
            if jobs:
                self._apart[lease] = []
            return jobs

    def disclaim(self, lease: int) -> None:
        """Carry out the loads of a lease that nobody has claimed like anybody's."""
        with self._changed:
            for job in self._apart.pop(lease, ()):
                self._queue.hand_over(job)
            self._changed.notify_all()

    def leases_of(self, ids: Collection[int]) -> set[int]:
        """The leases that carry out any of these moves themselves."""
        with self._changed:
            wanted = set(ids)
            jobs = [job for job in self._running if job.lease and wanted.intersection(job.ids)]
            jobs += filter(None, map(self._queue.job_of, wanted))
            return {job.lease for job in jobs if job.lease}

    def startable(self, job: Job) -> bool:
        """Whether `begin` would not block."""
        with self._changed:
            return job.lost or job.begun or self._queue.free(job)

    def begin(self, job: Job) -> bool:
        """Block until a job apart may start; False if it never will.

        Raises:
            TransferError: the executor is closed, or what the job waits for hangs.
        """
        self._until(lambda: job.lost or self._queue.free(job), f"{len(job.ids)} loads cannot start")
        with self._changed:
            if job.lost:
                return False
            self._queue.take(job)
            self._running.append(job)
            job.begun = True
            return True

    def copying(self, job: Job) -> None:
        """A job apart begins to copy: from now on its deadline counts."""
        with self._changed:
            job.started_ns = self.clock()
            self.feedback.began(job, job.started_ns)

    def copied(self, job: Job, brought: int, layer: int) -> None:
        """A job apart has stopped copying.

        Args:
            job: which.
            brought: bytes that have come; 0 if that failed.
            layer: its layers below this one are there, which others may wait for.
        """
        with self._changed:
            job.started_ns = None
            self.feedback.ended(job, self.clock(), brought=brought)
            if brought:
                self._layers.update(dict.fromkeys(job.ids, layer))
            self._changed.notify_all()

    def tell(self, change: Callable[[], object]) -> None:
        """Change something that others look at within `until`."""
        with self._changed:
            change()
            self._changed.notify_all()

    def end(self, job: Job, error: str | None = None, *, cancelled: bool = False) -> None:
        """A job apart has ended: well, badly, or because nobody wants it any more."""
        self._end(job, error, cancelled=cancelled)

    def until(self, done: Callable[[], bool], stuck: str) -> None:
        """Block until something is so that moves bring about; looks again when any gets further.

        Raises:
            TransferError: with the text `stuck`, if no move is left that could bring it about.
        """
        self._until(done, stuck)

    def layer_there(self, ids: Collection[int], layer: int) -> bool:
        """Whether each of these moves, of which none has ended, has brought this layer."""
        with self._changed:
            return all(self._layers.get(ident, 0) > layer for ident in ids)

    def stalled(self, ids: Collection[int]) -> bool:
        """Whether moves, of which none has ended, wait for what engines carry out themselves.

        Some of them have not been handed out, and the executor has nothing to do.
        """
        with self._changed:
            busy = any(not job.lease for job in self._running) or any(self._queue)
            return not busy and not self._pending.issuperset(ids)

    def quiet(self) -> bool:
        """Whether no load runs or waits that a lease awaits."""
        with self._changed:
            return not self._loading()

    def commit(
        self,
        lease: Lease,
        tokens: Any,  # noqa: ANN401
        staged: Sequence[tuple[int, int]],
        target: int,
    ) -> Committed:
        """Commit tokens of a lease whose blocks have been brought down, layer by layer, already.

        Args:
            lease: whose tokens.
            tokens: the tokens, as `Lease.commit` takes them.
            staged: by index of a block on the lease's path, the spare block of the next tier's pool
                that holds its bytes. They are the executor's from now on.
            target: the tier of that pool.
        """
        pool = self.pools[target]
        spares = dict(staged)
        try:
            with self._changed:
                self._poll()
                table = lease.slots(0)
                committed = lease.commit(tokens, now=self.clock())
                by_slot = {int(table[at]): spare for at, spare in spares.items()}
                self._take(by_slot, target)
                spares = dict(enumerate(by_slot.values()))
        finally:
            if isinstance(pool, Pool):
                pool.put_back(spares.values())
        return committed

    def before_close(self, close: Callable[[], None]) -> None:
        """Have something closed first that uses this executor."""
        self._closing.append(close)

    def _look(self) -> None:
        """Whether the pools may exchange bytes, and are of the manager's blocks."""
        forms = [
            (f"tier {at} ({tier.kind})", pool.form)
            for at, (tier, pool) in enumerate(zip(self.manager.tiers, self.pools, strict=True))
            if isinstance(pool, Formed)
        ]
        agree(forms)
        for name, form in forms[:1]:
            managed = Form.of(self.manager.model, form.layout, self.manager.block_tokens)
            agree([("the manager", managed), (name, form)])

    def _keep(self, tier: int, pool: Lasting) -> None:
        """As `Lasting.keep`; with a deadline, a thread that hangs is left behind."""
        name = f"tier {tier} ({self.manager.tiers[tier].kind})"
        hung = self._errands.get(tier)
        if hung is not None and hung.running:
            raise TransferError(f"{name}: an earlier save still hangs after {hung.seconds:.3f} s")
        index = self.manager.index(tier, now=self.clock())
        if self._deadline_ns is None:
            pool.keep(index)
            return
        errand = self._errands[tier] = Errand(lambda: pool.keep(index), self.clock)
        if not errand.wait(self._deadline_ns):
            raise TransferError(
                f"{name}: {len(index)} blocks were not written down within "
                f"{self._deadline_ns / _NS:.3f} s"
            )

    def _until(self, done: Callable[[], bool], stuck: str) -> None:
        while True:
            with self._changed:
                news = self._poll()
                if done():
                    return
                job = self._next(None) if not self._threads else None
                if job is None and not news:
                    if len(self._pending) == self._late():
                        raise TransferError(stuck)
                    self._changed.wait(self._patience())
            if job is not None:
                self._carry_out(job, self._compute)

    def _poll(self) -> bool:
        """Look after everything; tells whether there was anything to do."""
        if self._broken is not None:
            raise TransferError(f"a worker could not report: {self._broken}") from self._broken
        if self._closed:
            raise TransferError("the executor is closed")
        for lease in [lease for lease, jobs in self._apart.items() if jobs]:
            try:
                self.manager.lease(lease)
            except ClosedError:  # released before anybody retrieved it
                self.disclaim(lease)
        return any([self._expire(), self._take(), self._give_up()])

    def _take(self, staged: dict[int, int] | None = None, target: int = 0) -> bool:
        """Accept what the manager hands out. The lock is held: no completion can slip between.

        Args:
            staged: by slot of the first tier, a spare block that holds its bytes; what is stored to
                `target` whole takes one out.
            target: the tier whose spare blocks they are.
        """
        if self._closed or self._broken is not None:
            return False
        moves = self.manager.moves()
        if not len(moves):
            return False
        event = self._compute.record_event() if self._compute is not None else None
        jobs = group(moves, self.pools, self._pending, self._moves_per_job, self._apart)
        if staged:
            _stage(jobs, self.pools[0], self.pools[target], staged)
        for job in jobs:
            job.event = event
            self._queue.add(job)
            if job.lease:
                self._apart[job.lease].append(job)
        self._changed.notify_all()
        return True

    def _next(self, worker: threading.Thread | None) -> Job | None:
        job = self._queue.pop(self._may)
        if job is not None:
            job.started_ns = self.clock()
            job.worker = worker
            self._running.append(job)
            if job.urgency != Urgency.DEMAND and self._unhurried:
                self._budget.spend(job, self.clock())
            self.feedback.began(job, job.started_ns)
        return job

    def _may(self, job: Job) -> bool:
        """Whether a job may start now."""
        if job.urgency == Urgency.DEMAND:
            return True
        if job.store and self._loading():
            return False
        return not self._unhurried or self._budget.free_at(job) <= self.clock()

    def _loading(self) -> bool:
        """Whether a load copies that a lease waits for."""
        return any(
            job.urgency == Urgency.DEMAND
            and not job.store
            and not job.failed
            and job.started_ns is not None
            for job in self._running
        )

    def _work(self) -> None:
        compute = self._compute
        stream = None if compute is None else torch.cuda.Stream(compute.device)
        worker = threading.current_thread()
        while True:
            with self._changed:
                job = self._next(worker)
                while job is None:
                    if self._closed or self._broken is not None:
                        return
                    self._changed.wait(self._patience())
                    self._expire()
                    job = self._next(worker)
            self._carry_out(job, stream)

    def _carry_out(self, job: Job, stream: torch.cuda.Stream | None) -> None:
        try:
            with torch.cuda.stream(stream) if stream is not None else nullcontext():
                if stream is not None and job.event is not None:
                    stream.wait_event(job.event)
                for done in job.run(self._layers_per_report):
                    if stream is not None:
                        stream.synchronize()
                    if done < job.layers[1] - job.layers[0]:
                        self._progress(job, done)
        except BaseException as caught:  # whatever a tier raises fails its moves
            self._end(job, f"{type(caught).__name__}: {caught}")
            if job.worker is None and not isinstance(caught, Exception):
                raise  # Ctrl-C is the caller's
        else:
            self._end(job, None)

    def _progress(self, job: Job, layers_done: int) -> None:
        with self._changed:
            late = job.failed
            if not late:
                self._layers.update(dict.fromkeys(job.ids, job.layers[0] + layers_done))
                self._report(job.ids, layers_done=layers_done)
                self._changed.notify_all()
        if not late:
            self._told(job, layers_done, None)

    def _end(self, job: Job, error: str | None, *, cancelled: bool = False) -> None:
        with self._changed:
            self._running.remove(job)
            self._queue.done(job)
            self._pending.difference_update(job.ids)
            for ident in job.ids if self._layers else ():
                self._layers.pop(ident, None)
            job.let_go()
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
            self._changed.notify_all()
        self._told(job, job.layers[1] - job.layers[0] if error is None else 0, error)

    def _release(self, ids: Collection[int], *, ok: bool) -> None:
        """Start what waited for moves that ended well; forget what waited for failed ones."""
        for ident in ids:
            self._pending.difference_update(self._queue.ended(ident, ok=ok))

    def _cancel(self, ids: Collection[int] | None, why: str, *, blame: bool = False) -> int:
        gone, with_them = self._queue.cancel(ids)
        if gone:
            self._pending.difference_update(gone, with_them)
            self._report(gone, error=why, cancelled=not blame)
            self._changed.notify_all()
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
        if self._threads and len(hung) == len(self._threads):
            awaited = [
                ident
                for job in self._queue
                if job.store and job.urgency == Urgency.DEMAND
                for ident in job.ids
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
            self._changed.notify_all()
        return self._late() > before

    def _late(self) -> int:
        """Moves that still run though they were reported failed."""
        return sum(len(job.ids) for job in self._running if job.failed)

    def _patience(self) -> float | None:
        """Seconds until a deadline or until a budget lets something start; None for neither."""
        now = self.clock()
        running = [job.started_ns for job in self._running if not job.failed]
        starts = [started for started in running if started is not None]
        times = [self._budget.free_at(job) for job in self._queue] if self._budget.limited else []
        times = [time for time in times if time > now]
        if self._deadline_ns is not None and starts:
            times.append(min(starts) + self._deadline_ns)
        return max(0.0, (min(times) - now) / _NS) if times else None

    def _report(
        self,
        ids: Sequence[int],
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

    def _told(self, job: Job, layers_done: int, error: str | None) -> None:
        """Tell the caller, outside the lock: what it does with the news is its own time."""
        if self._tell is None:
            return
        layers = job.layers[1] - job.layers[0]
        try:
            self._tell(Progress(tuple(job.ids), layers_done, layers, error, len(self._pending)))
        except Exception as broken:  # noqa: BLE001 - as above
            with self._changed:
                self._break(broken)

    def _break(self, broken: BaseException) -> None:
        self._broken = broken
        self._changed.notify_all()


def _stage(
    jobs: Iterable[Job], first: Pool | Storage, target: Pool | Storage, staged: dict[int, int]
) -> None:
    """Give stores that bring whole blocks the spare blocks that hold their bytes already."""
    if not isinstance(target, Pool) or not isinstance(first, Pool):
        return
    for job in jobs:
        if not job.store or job.source is not first or job.target is not target:
            continue
        if job.layers != (0, first.layers):
            continue
        for ident, (slot, _) in zip(job.ids, job.slots, strict=True):
            spare = staged.pop(slot, None)
            if spare is not None:
                job.staged[ident] = spare
