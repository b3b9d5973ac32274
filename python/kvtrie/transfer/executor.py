"""Executor: a manager and a `Runner` in one process: it feeds the moves and reports their ends.

It also waits for leases, cancels moves, and saves the index of persistent tiers. A layer-wise
engine takes the loads of its leases by `claims`.
Invariant: a call that waits is woken by an end, a failure or a deadline. Cost: as of `Runner`.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol, cast

from kvtrie.errors import ConfigError, TransferError
from kvtrie.tiers import (
    BlockFormat,
    HasBlockFormat,
    NotesUses,
    Pool,
    Recalled,
    agree,
    parts_of,
)
from kvtrie.transfer.claims import Claims
from kvtrie.transfer.deadline_call import DeadlineCall
from kvtrie.transfer.feedback import Feedback
from kvtrie.transfer.prefetch import BlockingPrefetcher
from kvtrie.transfer.report import Progress
from kvtrie.transfer.runner import Runner
from kvtrie.transfer.used_blocks import UsedBlocks

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from typing import Self

    import numpy as np
    from numpy.typing import NDArray
    from typing_extensions import Buffer

    from kvtrie import BlockManager, Index, Lease, Moves, Scope
    from kvtrie.tiers import TierBytes
    from kvtrie.transfer.job import Job
    from kvtrie.transfer.prefetch import Prefetched

__all__ = ["Executor", "Progress"]

_LOG = logging.getLogger(__name__)
_NS = 1_000_000_000
_FOREVER_NS = 1 << 62


class Attached(Protocol):
    """An engine that copies KV of an executor during passes, and is closed before it."""

    @property
    def staged_bytes(self) -> int:
        """Bytes that it holds outside the slots of the tiers."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


@dataclass(frozen=True, slots=True)
class _ManagerSink:
    """The `Sink` of a manager. It refers to no executor, so that one may simply be dropped."""

    manager: BlockManager
    feedback: Feedback

    def more(self, shared: int) -> Moves:
        return self.manager.moves(shared=shared)

    def dropped(self) -> int:
        return self.manager.shared_stores[1]

    def began(self, job: Job, now: int) -> None:
        self.feedback.began(job, now)

    def ended(self, job: Job, now: int, *, brought: int) -> None:
        self.feedback.ended(job, now, brought=brought)

    def report(
        self,
        ids: Sequence[int] | NDArray[np.uint64],
        now: int,
        *,
        layers_done: int | None,
        error: str | None,
        hung: bool,
        cancelled: bool,
    ) -> None:
        self.manager.complete(
            ids,
            now=now,
            ok=error is None,
            layers_done=layers_done,
            error=error,
            hung=hung,
            cancelled=cancelled,
        )


class Executor:
    """The moves of one manager, carried out by threads of its process.

    Moves that leases await come first, then other loads, then other stores. Those others keep to
    the `io_budget` of both their tiers, and such stores wait while awaited loads run: both
    directions at once cost each of them 18 to 20 % on PCIe (Pensieve, section 4.3.2).

    With `workers=0` bytes are copied only during `wait` or `drain`, one job after another in the
    manager's order, which makes a run repeatable.

    Ctrl-C interrupts a call that waits, and nothing else: a copy that runs ends, and `drain` goes
    on later. One dropped without `close` cancels moves that have not started; its threads end.
    It belongs to the process that made it: in a fork every call is a `ConfigError`.

    Args:
        manager: the source of the moves.
        pools: a `Pool` or a `Storage` per tier, in the manager's order: the result of `open_pools`,
            with the places of disk and remote tiers filled in.
        workers: threads that copy while the caller computes; on a GPU each has a separate copy
            stream.
        deadline_s: seconds that a job may run before its moves are reported failed; its slots
            stay out of use until it ends. While all workers hang, no job starts and waiting jobs
            are cancelled. Also limits each tier in `save`. None waits for ever.
        clock: nanoseconds, monotone; also the `now` of every report.
        layers_per_report: layers that are copied between two reports of progress.
        moves_per_job: the most moves that are copied and reported together.
        progress: called from the worker's thread whenever moves get further or end, well or not;
            those that were reported failed at their deadline, when they end. Its first exception
            is logged.

    Attributes:
        runner: the threads that copy.
        claims: the loads that a layer-wise engine carries out itself.
        feedback: measured speeds of the lanes.
        missed_tokens: computed prompt tokens by cause, if an engine counts them.

    Raises:
        ConfigError: pools that do not match the manager's tiers, or have different block formats
            (a storage without a `block_format` takes any bytes), or a number out of range. Any
            call raises it in another process than the one that made the executor.
    """

    def __init__(
        self,
        manager: BlockManager,
        pools: Sequence[TierBytes | None],
        *,
        workers: int = 2,
        deadline_s: float | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
        layers_per_report: int = 8,
        moves_per_job: int = 64,
        progress: Callable[[Progress], None] | None = None,
    ) -> None:
        given = [pool for pool in pools if pool is not None]
        if len(given) != len(manager.tiers):
            raise ConfigError(f"{len(given)} pools given for {len(manager.tiers)} tiers")
        _look(manager, given)
        self.manager = manager
        self.feedback = Feedback(manager)
        self.runner = Runner(
            given,
            tiers=manager.tiers,
            workers=workers,
            deadline_s=deadline_s,
            clock=clock,
            layers_per_report=layers_per_report,
            moves_per_job=moves_per_job,
            progress=progress,
            sink=_ManagerSink(manager, self.feedback),
        )
        self._ledger = self.runner.ledger
        self.claims = Claims(manager, self.runner, self.feedback)
        self.clock = clock
        self.missed_tokens: Counter[str] = Counter()
        self._section = self._ledger.section
        self._deadline_calls: dict[int, DeadlineCall] = {}
        self._engines: list[Attached] = []
        self._used = {
            tier: UsedBlocks(manager, tier)
            for tier, pool in enumerate(given)
            if isinstance(pool, NotesUses)
        }
        self._notes: dict[int, DeadlineCall] = {}
        self._prefetcher = BlockingPrefetcher(manager, self._ledger)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._section.here:  # a fork that leaves the block leaves what its parent holds alone
            self.close()

    @property
    def pools(self) -> tuple[TierBytes, ...]:
        """The pool or storage of each tier."""
        return cast("tuple[TierBytes, ...]", self._ledger.pools)

    def poll(self) -> int:
        """Hand new moves to the workers and fail those past their deadline; never blocks.

        Engines call it after whatever may have caused moves (acquire, commit, release).

        Returns:
            The number of moves that have not ended.

        Raises:
            TransferError: the executor is closed, or a worker could not report.
        """
        with self._section:
            self._ledger.poll(self.claims.sweep)
            return self._ledger.pending

    def wait(self, lease: Lease) -> None:
        """Block until nothing that `lease` awaits is on its way.

        Raises:
            TransferError: the lease awaits moves that were never handed out, or that hang and may
                still write a slot of the lease. Release it and acquire again.
        """
        stuck = f"lease {lease.id} awaits moves that hang or were never handed out: release it"
        self.claims.until(lambda: self.claims.ready(lease), stuck)

    def drain(self) -> None:
        """Block until every move, also those that others cause by ending, has ended.

        Jobs past their deadline are not waited for. Claimed loads that their engine has not begun
        are carried out by the workers; the engine has to end those that it has begun.
        """
        self.claims.disclaim_all()
        self.claims.until(lambda: self._ledger.hangs, "the remaining moves cannot be carried out")

    def cancel(self, ids: Collection[int] | NDArray[np.uint64] | None = None) -> int:
        """Fail moves that have not started; without blame, so that they can be asked for again.

        Args:
            ids: which moves; None means all. Those that run, have ended or are unknown are left
                alone.

        Returns:
            How many moves will not run, those that waited for them included.
        """
        with self._section:
            self._ledger.take()
            return self.runner.cancel(ids)

    def prefetch(
        self,
        tokens: Sequence[int] | NDArray[np.integer] | Buffer,
        *,
        scope: Scope | None = None,
        deadline_s: float,
    ) -> Prefetched:
        """Ask the shared store for the blocks after the local match, and bring them to host.

        `acquire` never asks a store: call this before it for prompts of which another process may
        have computed a part. Blocks that the store has are marked as resident on tier `remote`; a
        load that is then late or fails is computed instead.

        Args:
            tokens: the prompt.
            scope: the scope of its blocks.
            deadline_s: seconds after which the call returns, above 0.

        Returns:
            Counts of blocks; all 0 without a remote tier that `open_pools` opened.

        Raises:
            ConfigError: a deadline that is not above 0 and finite, a model without a fingerprint.
        """
        return self._prefetcher.prefetch(tokens, scope, deadline_s)

    def flush(self) -> None:
        """Copy down the blocks that are only on a tier above, as far as there is room, and wait.

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
        """Flush, and let every persistent tier write down its blocks, with their ages and uses.

        Raises:
            TransferError: a tier did not write its blocks, or not within the deadline. `restore`
                still finds the blocks of an earlier save.
        """
        self.flush()
        for tier, pool in enumerate(self.pools):
            if isinstance(pool, Recalled):
                self._keep(tier, pool)

    def restore(self) -> int:
        """Find the blocks again that persistent tiers kept; call it before the first request.

        Returns:
            How many blocks are there again.
        """
        with self._section:
            now = self.clock()
        left = {
            tier: pool.recall()
            for tier, pool in reversed([*enumerate(self.pools)])
            if isinstance(pool, Recalled)
        }
        found, more, tiers = 0, True, len(left)
        # A block on one tier may continue a path whose start is on another.
        while more:
            loaded = {
                tier: self.manager.load_index(index, tier, now=now) for tier, index in left.items()
            }
            found += sum(loaded.values())
            left = {tier: index for tier, index in left.items() if loaded[tier] < len(index)}
            more = bool(left) and tiers > 1 and any(loaded.values())
        return found

    def used(self, blocks: NDArray[np.uint64]) -> None:
        """Record uses of blocks, for tiers that outlive the process.

        Every five seconds and in `close`, a separate thread writes ages and uses, so that after a
        kill eviction continues with the right blocks. A tier that fails or hangs blocks no caller.

        Args:
            blocks: their handles, as `Lease.handles` has them; best just before the release.
        """
        with self._section:
            for tier, used in self._used.items():
                used.use(blocks)
                self._note_uses(tier, idle=False)

    def _note_uses(self, tier: int, *, idle: bool) -> None:
        """Begin to write down what was used on a tier, if nothing of it is being written."""
        call = self._notes.get(tier)
        if call is None or not call.running:
            index = self._used[tier].take(self.clock(), idle=idle)
            if len(index):
                pool = cast("NotesUses", self.pools[tier])
                self._notes[tier] = DeadlineCall(partial(_note_uses, pool, index), self.clock)

    def _note_the_rest(self) -> None:
        """Write down all that was used, within the deadline of each tier."""
        deadline = self._ledger.deadline_ns or _FOREVER_NS
        for tier, used in self._used.items():
            self._note_uses(tier, idle=True)
            while (call := self._notes.get(tier)) is not None and call.wait(deadline) and len(used):
                self._note_uses(tier, idle=True)
        self._used = {}

    def close(self) -> None:
        """Cancel the moves that have not started, let the running ones end, join the threads.

        A thread that hangs beyond the deadline is not joined. The pools stay open: the `close` of
        each gives its memory or its folder back. Closing twice does nothing.
        """
        with self._section:
            # They refer to this executor, whose pools are to go when it is let go.
            engines, self._engines = self._engines, []
        for engine in engines:
            engine.close()
        self._note_the_rest()
        self._prefetcher.close()
        self.runner.close()

    def attach(self, engine: Attached) -> None:
        """Count what an engine stages, and close it before this executor."""
        self._engines.append(engine)

    @property
    def staged_bytes(self) -> int:
        """Bytes that passes over layers hold outside the slots of the tiers; 0 between passes.

        They are spare blocks that a store has set aside, staging buffers on the first tier's
        device and layer buffers for fusion.
        """
        spare = sum(pool.staged_bytes for pool in self.pools if isinstance(pool, Pool))
        return spare + sum(engine.staged_bytes for engine in self._engines)

    def _keep(self, tier: int, pool: Recalled) -> None:
        """As `Recalled.keep`; with a deadline, a thread that hangs is not joined."""
        name = f"tier {tier} ({self.manager.tiers[tier].kind})"
        call = None
        with self._section:
            hung = self._deadline_calls.get(tier)
            if hung is not None and hung.running:
                seconds = f"{hung.seconds:.3f} s"
                raise TransferError(f"{name}: an earlier save still hangs after {seconds}")
            index = self.manager.index(tier, now=self.clock())
            if self._ledger.deadline_ns is not None:
                call = self._deadline_calls[tier] = DeadlineCall(
                    lambda: pool.keep(index), self.clock
                )
        if call is None or self._ledger.deadline_ns is None:
            pool.keep(index)
        elif not call.wait(self._ledger.deadline_ns):
            raise TransferError(
                f"{name}: {len(index)} blocks were not written down within "
                f"{self._ledger.deadline_ns / _NS:.3f} s"
            )


def _note_uses(pool: NotesUses, index: Index) -> None:
    """As `NotesUses.note_uses`; a failure is only logged: the blocks are found all the same."""
    try:
        pool.note_uses(index)
    except Exception as error:  # noqa: BLE001 - a user's storage may raise anything
        _LOG.warning("uses of %d blocks were not written down: %s", len(index), error)


def _look(manager: BlockManager, pools: Sequence[TierBytes]) -> None:
    """Raise if the first pool that has a format does not keep the KV of the manager's model."""
    groups = max(1, len(manager.stats().tiers[manager.tiers[0].kind].groups))
    for at, pool in enumerate(pools):
        mine = len(parts_of(pool))
        if mine != groups:
            raise ConfigError(
                f"tier {at} ({manager.tiers[at].kind}) keeps {mine} groups of layers apart, the "
                f"manager {groups}: open_pools takes the manager's model and resume"
            )
    for at, pool in enumerate(pools):
        parts = [part for part in parts_of(pool) if isinstance(part, HasBlockFormat)]
        for group, part in enumerate(parts):
            found, model, size = part.block_format, manager.model, manager.block_tokens
            name = f"tier {at} ({manager.tiers[at].kind})"
            wanted = (
                BlockFormat.first(model, found.layout, size)
                if groups == 1
                else BlockFormat.of_group(model, group, size, None)
            )
            agree([("the manager", wanted, False), (name, found, False)])
        if parts:
            return
