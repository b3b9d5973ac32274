"""Runner: a pool of threads that carries out moves on copy streams, without a manager.

It runs in the process that holds the bytes. In the manager's process an `Executor` feeds it; in any
other process moves arrive by `submit`, and `reports` are sent back to the manager's process.
Invariant: nothing waits for a device beyond the deadline; no store of the background starts while a
load runs that a lease awaits. Each storage has its own threads and queue: one that hangs keeps only
its own threads and slots, and copies between pools never wait for it. What holds for each move is
written in `ledger.py`. Cost: that of the copies, and of the ledger's lock per job.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING

import torch

from kvtrie.at_exit import end_at_exit
from kvtrie.errors import ConfigError, KvtrieError
from kvtrie.tiers import HasBlockFormat, KeptPool, Pool, agree, in_memory, parts_of
from kvtrie.transfer.carry import carry_out
from kvtrie.transfer.ledger import Ledger
from kvtrie.transfer.outbox import Outbox, name_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from typing import Self

    import numpy as np
    from numpy.typing import NDArray

    from kvtrie import Moves
    from kvtrie.settings.tier import Tier
    from kvtrie.tiers import TierBytes
    from kvtrie.transfer.report import MoveReport, Progress, Sink
    from kvtrie.transfer.section import Ticket

__all__ = ["Runner"]

_NS = 1_000_000_000
_WORKERS = 2  # threads of a storage of which no tier says how many
_MOST_UNSEALED = 64  # blocks of a kept pool; while more wait, a thread seals between two jobs


class Runner:
    """Threads that copy what moves say, between the pools of one process.

    A move may name as `after` another one that this runner has or has had. With several ranks,
    submit a move only when its `after` has ended well on all of them.
    One that is dropped without `close` cancels what has not started, and its threads end. It
    belongs to the process that made it: in a fork every call is a `ConfigError`.

    Args:
        pools: a `Pool` or a `Storage` per tier, in the manager's order; None for a tier whose bytes
            are not in this process.
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
        ledger: the moves that have not ended, and their lock.
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
        memory = [in_memory(pool) for pool in pools]
        for group in range(max(map(len, map(parts_of, pools)), default=0)):
            agree(
                (name_of(at, tiers), part.block_format, memory[at])
                for at, pool in enumerate(pools)
                for part in parts_of(pool)[group : group + 1]
                if isinstance(part, HasBlockFormat)
            )
        on_call = workers == 0
        counts: dict[int | None, int] = {None: workers or 1}
        if not on_call:
            storages = [at for at, pool in enumerate(pools) if pool is not None and not memory[at]]
            counts |= {at: tiers[at].threads() if tiers else _WORKERS for at in storages}
        every = [part for pool in pools for part in parts_of(pool)]
        devices = (part.device for part in every if isinstance(part, Pool))
        cuda = next((device for device in devices if device.type == "cuda"), None)
        compute = None if cuda is None else torch.cuda.current_stream(cuda)
        threads = {
            storage: [self._thread(storage, at, compute, own=not on_call) for at in range(count)]
            for storage, count in counts.items()
        }
        self.threads = [thread for each in threads.values() for thread in each]
        self._outbox = Outbox(
            pools, tiers, clock, sink=sink, callback=progress, threads=self.threads
        )
        self._layers_per_report = layers_per_report
        self._kept = [part for part in every if isinstance(part, KeptPool)]
        self.ledger = Ledger(
            pools,
            tiers,
            threads,
            self._outbox,
            on_call=on_call,
            deadline_ns=None if deadline_s is None else int(deadline_s * _NS),
            clock=clock,
            moves_per_job=moves_per_job,
            compute=compute,
        )
        for thread in self.threads:
            thread.start()
            end_at_exit(thread, self._end_at_exit)

    def _thread(
        self, storage: int | None, at: int, compute: torch.cuda.Stream | None, *, own: bool
    ) -> threading.Thread:
        """A worker, of a storage or of all memory, with a stream of its own or the caller's."""
        stream = torch.cuda.Stream(compute.device) if own and compute is not None else compute
        return threading.Thread(
            target=_work,
            args=(weakref.ref(self), stream, storage),
            name=f"kvtrie-{'transfer' if storage is None else f'tier{storage}'}-{at}",
            daemon=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.ledger.here:  # a fork that leaves the block leaves its parent's threads alone
            self.close()

    def __del__(self) -> None:
        """Fail every move that is left: no thread of a dropped runner works for it."""
        # Missing where the arguments were refused.
        ledger: Ledger | None = getattr(self, "ledger", None)
        if ledger is None or not ledger.here or sys.is_finalizing():
            return
        self._outbox.callback = None
        ledger.abandon("the runner was dropped")

    def submit(self, moves: Moves) -> None:
        """Take moves in, and start them when they may.

        A move that no pool of this process can serve is reported failed, as is one whose `after`
        has failed here; an `after` that this runner has never had counts as ended well.

        Raises:
            ConfigError: a move that is here already, or twice in `moves`.
            TransferError: the runner is closed.
        """
        self.ledger.submit(moves)

    def reports(self, *, wait: bool = False) -> list[MoveReport]:
        """News since the last call, in the order in which it came.

        Args:
            wait: block until there is any, or until no move is left that could bring any.

        Raises:
            TransferError: a worker could not report.
        """
        ledger = self.ledger
        if wait and not ledger.closed:
            ledger.until(lambda: bool(self._outbox.news) or ledger.hangs, "no move is left")
        with ledger.section:
            if not ledger.closed:
                ledger.poll()
            return self._outbox.take()

    def drain(self) -> list[MoveReport]:
        """Block until every move has ended, but for those that hang; the news since the last call.

        Raises:
            TransferError: the runner is closed, or a worker could not report.
        """
        ledger = self.ledger
        ledger.until(lambda: ledger.hangs, "no move is left")
        return self.reports()

    @property
    def pools(self) -> tuple[TierBytes | None, ...]:
        """The pool or storage of each tier."""
        return self.ledger.pools

    @property
    def pending(self) -> int:
        """Moves that have not ended, those that hang included."""
        return self.ledger.pending

    @property
    def hangs(self) -> bool:
        """Whether all moves that have not ended hang."""
        return self.ledger.hangs

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
        return self.ledger.cancel(ids, why, blame=blame)

    def wake(self) -> None:
        """Have idle threads look again: blocks of a kept pool wait to be sealed."""
        self.ledger.wake()

    def close(self) -> None:
        """Cancel the moves that have not started, let the running ones end, join the threads.

        A thread that hangs beyond the deadline is not joined. Closing twice does nothing.
        """
        self.ledger.shut("closed before the move started")
        hanging = self.ledger.settle()
        for thread in self.threads:
            if thread not in hanging:
                thread.join()

    def _end_at_exit(self) -> None:
        if self.ledger.here:
            self.ledger.shut("the process ends")

    def attend(self, stream: torch.cuda.Stream | None, storage: int | None = None) -> Ticket | None:
        """Carry out, as one of the threads, the jobs that may start.

        Args:
            stream: the thread's copy stream on a GPU.
            storage: the storage whose jobs it carries out; None for copies between pools.

        Returns:
            The ticket to wait for before there may be more; None if there never will be.
        """
        worker, ledger = threading.current_thread(), self.ledger
        while True:
            with ledger.section:
                jobs = ledger.begin(worker, storage)
                if not jobs and not any(pool.sealable for pool in self._kept):
                    return None if ledger.over else ledger.section.ticket(ledger.patience())
            if jobs:
                carry_out(ledger, jobs, stream, self._layers_per_report)
            self._seal(_MOST_UNSEALED if jobs else 0)

    def _seal(self, most: int) -> None:
        """Seal blocks of kept pools, until at most this many wait or, if it is 0, one batch."""
        for pool in self._kept:
            try:
                while pool.unsealed > most and pool.seal() and most:
                    pass
            except KvtrieError as error:
                why = f"blocks are not kept for the next process: {error}"
                self._outbox.warn(pool.file.path, why)


def _work(ref: weakref.ref[Runner], stream: torch.cuda.Stream | None, storage: int | None) -> None:
    """A thread's loop: it refers to its runner only while it works, so that one may be dropped."""
    while (runner := ref()) is not None:
        try:
            ticket = runner.attend(stream, storage)
        except BaseException as broken:  # noqa: BLE001 - raised to the caller that waits
            runner.ledger.stop(broken)
            return
        del runner
        if ticket is None:
            return
        ticket.wait()
