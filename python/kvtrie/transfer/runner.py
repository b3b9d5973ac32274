"""Runner: a pool of threads executing moves on copy streams, without a manager.

It runs in the process of the bytes. In the manager's process an `Executor` feeds it. In any
other process moves arrive by `submit`, and `reports` are sent back to the manager's process.
Invariant: no call waits for a device beyond the deadline. No background store starts while an
awaited load runs. Each storage has its own threads and queue: a hung storage blocks only its own
threads and slots, and copies between pools never wait for it. `ledger.py` documents the invariants
of a move.
Cost: the copies, and the ledger's lock per job.
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
_WORKERS = 2  # threads of a storage without a tier setting
_MOST_UNSEALED = 64  # blocks of a kept pool. Above it a thread seals between two jobs


class Runner:
    """Threads copying moves between the pools of a process.

    The `after` of a move may be any earlier move of this runner. With several ranks, submit a move
    only after its `after` has succeeded on all ranks. A runner dropped without `close` cancels the
    moves not started, and its threads end. A runner works only in the process of its creation: in a
    fork every call is a `ConfigError`.

    Args:
        pools: a `Pool` or a `Storage` per tier, in the manager's order, or None for a tier outside
            this process.
        tiers: the manager's tiers, for their `io_budget` and names. Without them nothing is
            limited.
        workers: threads for copies between pools. On a GPU each thread has a separate copy stream.
            Each storage has `Tier.workers` additional threads. With 0, one thread executes all
            jobs, and only during a waiting call.
        deadline_s: maximum run time of a job in seconds, after which its moves are reported failed.
            None means no limit.
        clock: nanoseconds, monotone.
        layers_per_report: layers copied between two progress reports.
        moves_per_job: maximum number of moves copied and reported together.
        progress: called on the worker's thread with every report. Only its first exception is
            logged.
        sink: receives the reports and provides more moves. None collects the reports for `reports`.

    Attributes:
        ledger: the unended moves and their lock.
        threads: the workers.

    Raises:
        ConfigError: pools have different block formats, or a number is out of range.
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
            raise ConfigError(
                f"workers is {workers}, at least 0 wanted; layers_per_report is "
                f"{layers_per_report} and moves_per_job {moves_per_job}, at least 1 wanted"
            )
        if deadline_s is not None and deadline_s <= 0:
            raise ConfigError(f"deadline_s is {deadline_s}, more than 0 wanted, or None for none")
        memory = [in_memory(pool) for pool in pools]
        for group in range(max(map(len, map(parts_of, pools)), default=0)):
            agree(
                (name_of(at, tiers), part.block_format, memory[at])
                for at, pool in enumerate(pools)
                for part in parts_of(pool)[group : group + 1]
                if isinstance(part, HasBlockFormat)
            )
        inline = workers == 0
        counts: dict[int | None, int] = {None: workers or 1}
        if not inline:
            storages = [at for at, pool in enumerate(pools) if pool is not None and not memory[at]]
            counts |= {at: tiers[at].threads() if tiers else _WORKERS for at in storages}
        every = [part for pool in pools for part in parts_of(pool)]
        devices = (part.device for part in every if isinstance(part, Pool))
        cuda = next((device for device in devices if device.type == "cuda"), None)
        compute = None if cuda is None else torch.cuda.current_stream(cuda)
        threads = {
            storage: [self._thread(storage, at, compute, own=not inline) for at in range(count)]
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
            inline=inline,
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
        """Return a worker for a storage or for memory, with its own stream or the caller's."""
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
        # Leaving the block in a fork must not end the parent's threads.
        if self.ledger.in_own_process:
            self.close()

    def __del__(self) -> None:
        """Fail every remaining move, because no thread works for a dropped runner."""
        # Missing after refused arguments.
        ledger: Ledger | None = getattr(self, "ledger", None)
        if ledger is None or not ledger.in_own_process or sys.is_finalizing():
            return
        self._outbox.callback = None
        ledger.abandon("the runner was dropped")

    def submit(self, moves: Moves) -> None:
        """Accept moves, and start them as soon as allowed.

        A move with an invalid address, or with an `after` failed here, is reported failed. An
        `after` unknown to this runner counts as successful.

        Raises:
            ConfigError: a move is already present, or twice in `moves`.
            TransferError: the runner is closed.
        """
        self.ledger.submit(moves)

    def reports(self, *, wait: bool = False) -> list[MoveReport]:
        """Return the reports since the last call, in order of arrival.

        Args:
            wait: block until there is a report, or until no remaining move can bring a report.

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
        """Block until all moves have ended or hang, and return the reports since the last call.

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
        """Number of unended moves, including hung moves."""
        return self.ledger.pending

    @property
    def hangs(self) -> bool:
        """Whether all unended moves hang."""
        return self.ledger.hangs

    def cancel(
        self,
        ids: Collection[int] | NDArray[np.uint64] | None = None,
        why: str = "cancelled",
        *,
        blame: bool = False,
    ) -> int:
        """Cancel moves not yet started.

        Args:
            ids: the moves, or None for all. Running, ended and unknown moves are ignored.
            why: the reported reason.
            blame: report a failure instead of a cancellation, so that the moves are not planned
                again.

        Returns:
            The number of cancelled moves, including their dependents.
        """
        return self.ledger.cancel(ids, why, blame=blame)

    def wake(self) -> None:
        """Wake idle threads to seal the blocks of a kept pool."""
        self.ledger.wake()

    def close(self) -> None:
        """Cancel the moves not started, let running moves end, and join the threads.

        Threads hung beyond the deadline are not joined. Closing twice does nothing.
        """
        self.ledger.shut("closed before the move started")
        hanging = self.ledger.await_running()
        for thread in self.threads:
            if thread not in hanging:
                thread.join()

    def _end_at_exit(self) -> None:
        if self.ledger.in_own_process:
            self.ledger.shut("the process ends")

    def run_ready_jobs(
        self, stream: torch.cuda.Stream | None, storage: int | None = None
    ) -> Ticket | None:
        """Execute the startable jobs of the calling worker thread.

        Args:
            stream: the thread's copy stream on a GPU.
            storage: the storage of the thread, or None for copies between pools.

        Returns:
            The ticket to wait for before the next call, or None once no more jobs can come.
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
        """Seal blocks of kept pools, until at most `most` wait. With 0, seal a single batch."""
        for pool in self._kept:
            try:
                while pool.unsealed > most and pool.seal() and most:
                    pass
            except KvtrieError as error:
                why = f"blocks are not kept for the next process: {error}"
                self._outbox.warn(pool.file.path, why)


def _work(ref: weakref.ref[Runner], stream: torch.cuda.Stream | None, storage: int | None) -> None:
    """Run a thread's loop, referring to the runner only while working, so it can be dropped."""
    while (runner := ref()) is not None:
        try:
            ticket = runner.run_ready_jobs(stream, storage)
        except BaseException as broken:  # noqa: BLE001 - raised to the waiting caller
            runner.ledger.stop(broken)
            return
        del runner
        if ticket is None:
            return
        ticket.wait()
