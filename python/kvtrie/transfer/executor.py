"""Executor: connects a manager with a `Runner` in the same process.

It feeds moves to the runner and reports their ends. It also waits for leases, cancels moves and
saves the index of persistent tiers. A layer-wise engine takes the loads of its leases by `claims`.
Invariant: an end, a failure or a deadline wakes every waiting call.
Cost: as for `Runner`.
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
    """An engine copying KV of an executor during passes. The executor closes it first."""

    @property
    def staged_bytes(self) -> int:
        """Bytes held outside the slots of the tiers."""
        ...

    def close(self) -> None:
        """Release all resources."""
        ...


@dataclass(frozen=True, slots=True)
class _ManagerSink:
    """The `Sink` of a manager, without a reference to the executor, so it can be collected."""

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
    """Executes the moves of a manager on threads of its process.

    Moves awaited by leases start first, then other loads, then other stores. Moves without a
    waiting lease respect the `io_budget` of both their tiers, and their stores wait while an
    awaited load runs: both directions together cost each direction 18 to 20 % on PCIe (Pensieve,
    section 4.3.2).

    With `workers=0` bytes are copied only during `wait` or `drain`, one job at a time in the
    manager's order, so runs are repeatable.

    Ctrl-C interrupts only a waiting call: a running copy finishes, and a later `drain` continues.
    An executor dropped without `close` cancels the moves not started, and its threads end. An
    executor works only in the process of its creation: in a fork every call is a `ConfigError`.

    Args:
        manager: the source of the moves.
        pools: a `Pool` or a `Storage` per tier, in the manager's order: the result of `open_pools`,
            with the places of disk and remote tiers filled in.
        workers: threads that copy while the caller computes. On a GPU each thread has a separate
            copy stream.
        deadline_s: maximum run time of a job in seconds, after which its moves are reported failed.
            The slots stay out of use until the job ends. While all workers hang, no job starts and
            waiting jobs are cancelled. Also limits each tier in `save`. None means no limit.
        clock: nanoseconds, monotone. Also the `now` of every report.
        layers_per_report: layers copied between two progress reports.
        moves_per_job: maximum number of moves copied and reported together.
        progress: called on the worker's thread whenever moves advance or end, with or without an
            error. Moves failed at their deadline are passed at their real end. Only its first
            exception is logged.

    Attributes:
        runner: the copying threads.
        claims: the loads executed by a layer-wise engine.
        feedback: measured speeds of the lanes.
        missed_tokens: computed prompt tokens by cause, if an engine counts them.

    Raises:
        ConfigError: pools do not match the manager's tiers, block formats differ (a storage without
            a `block_format` takes any bytes), or a number is out of range. In a fork, every call
            raises it.
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
        # Leaving the block in a fork must not close the parent's executor.
        if self._section.in_own_process:
            self.close()

    @property
    def pools(self) -> tuple[TierBytes, ...]:
        """The pool or storage of each tier."""
        return cast("tuple[TierBytes, ...]", self._ledger.pools)

    def poll(self) -> int:
        """Hand new moves to the workers and fail late moves, without blocking.

        Engines call it after any call that may create moves (acquire, commit, release).

        Returns:
            The number of unended moves.

        Raises:
            TransferError: the executor is closed, or a worker could not report.
        """
        with self._section:
            self._ledger.poll(self.claims.sweep)
            return self._ledger.pending

    def wait(self, lease: Lease) -> None:
        """Block until all moves awaited by `lease` have ended.

        Raises:
            TransferError: the lease awaits moves never handed out, or hung moves with a possible
                late write to a slot of the lease. Release it and acquire again.
        """
        stuck = f"lease {lease.id} awaits moves that hang or were never handed out: release it"
        self.claims.until(lambda: self.claims.ready(lease), stuck)

    def drain(self) -> None:
        """Block until every move has ended, including moves created during the wait.

        Late jobs are not waited for. Workers execute the claimed loads not yet begun by their
        engine. The engine must end the claimed loads it has begun.
        """
        self.claims.disclaim_all()
        self.claims.until(lambda: self._ledger.hangs, "the remaining moves cannot be carried out")

    def cancel(self, ids: Collection[int] | NDArray[np.uint64] | None = None) -> int:
        """Cancel moves not yet started. They may be planned again.

        Args:
            ids: the moves, or None for all. Running, ended and unknown moves are ignored.

        Returns:
            The number of cancelled moves, including their dependents.
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
        """Look up a prompt in the shared store and start loading its blocks to host memory.

        `acquire` never queries a store. Call this first for prompts possibly computed by another
        process. Blocks found in the store are marked as resident on tier `remote`. If their load is
        late or fails, the blocks are computed instead.

        Args:
            tokens: the prompt.
            scope: the scope of its blocks.
            deadline_s: time limit of this call in seconds, above 0.

        Returns:
            Counts of blocks; all 0 without a remote tier opened by `open_pools`.

        Raises:
            ConfigError: the deadline is not above 0 and finite, or the model has no fingerprint.
        """
        return self._prefetcher.prefetch(tokens, scope, deadline_s)

    def flush(self) -> None:
        """Copy blocks without a lower copy to the tier below, while it has room, and wait.

        Afterwards every persistent tier holds whole prefixes (see `save`). The duration depends on
        the `io_budget` of the tiers.
        """
        # A tier may empty into the next tier during writes to the latter: two rounds each.
        for _ in range(2 * len(self.pools)):
            self.drain()
            if not self.manager.flush(now=self.clock()):
                break
        self.drain()

    def save(self) -> None:
        """Flush, and write the blocks of every persistent tier with their ages and uses.

        Raises:
            TransferError: a tier did not write its blocks, or not within the deadline. `restore`
                still finds the blocks of an earlier save.
        """
        self.flush()
        for tier, pool in enumerate(self.pools):
            if isinstance(pool, Recalled):
                self._keep(tier, pool)

    def restore(self) -> int:
        """Restore the blocks kept by persistent tiers. Call it before the first request.

        Returns:
            The number of restored blocks.
        """
        with self._section:
            now = self.clock()
        left = {
            tier: pool.recall()
            for tier, pool in reversed([*enumerate(self.pools)])
            if isinstance(pool, Recalled)
        }
        found, more, tiers = 0, True, len(left)
        # A block may continue a prefix stored on a different tier.
        while more:
            loaded = {
                tier: self.manager.load_index(index, tier, now=now) for tier, index in left.items()
            }
            found += sum(loaded.values())
            left = {tier: index for tier, index in left.items() if loaded[tier] < len(index)}
            more = bool(left) and tiers > 1 and any(loaded.values())
        return found

    def used(self, blocks: NDArray[np.uint64]) -> None:
        """Record uses of blocks, for persistent tiers.

        A separate thread writes ages and uses every five seconds and in `close`, so eviction after
        a kill continues with the right blocks. A failed or hung tier blocks no caller.

        Args:
            blocks: handles as in `Lease.handles`, preferably just before the release.
        """
        with self._section:
            for tier, used in self._used.items():
                used.use(blocks)
                self._note_uses(tier, idle=False)

    def _note_uses(self, tier: int, *, idle: bool) -> None:
        """Start writing the recorded uses of a tier, unless a write is already running."""
        call = self._notes.get(tier)
        if call is None or not call.running:
            index = self._used[tier].take(self.clock(), idle=idle)
            if len(index):
                pool = cast("NotesUses", self.pools[tier])
                self._notes[tier] = DeadlineCall(partial(_note_uses, pool, index), self.clock)

    def _note_the_rest(self) -> None:
        """Write all recorded uses, within the deadline of each tier."""
        deadline = self._ledger.deadline_ns or _FOREVER_NS
        for tier, used in self._used.items():
            self._note_uses(tier, idle=True)
            while (call := self._notes.get(tier)) is not None and call.wait(deadline) and len(used):
                self._note_uses(tier, idle=True)
        self._used = {}

    def close(self) -> None:
        """Cancel the moves not started, let running moves end, and join the threads.

        Threads hung beyond the deadline are not joined. The pools stay open: close each pool to
        release its memory or folder. Closing twice does nothing.
        """
        with self._section:
            # Break the reference cycle, so that dropping the executor frees its pools.
            engines, self._engines = self._engines, []
        for engine in engines:
            engine.close()
        self._note_the_rest()
        self._prefetcher.close()
        self.runner.close()

    def attach(self, engine: Attached) -> None:
        """Count an engine's staging bytes, and close the engine before this executor."""
        self._engines.append(engine)

    @property
    def staged_bytes(self) -> int:
        """Bytes held by layer-wise passes outside the slots of the tiers, or 0 between passes.

        They consist of spare blocks reserved for stores, staging buffers on the first tier's device
        and layer buffers for fusion.
        """
        spare = sum(pool.staged_bytes for pool in self.pools if isinstance(pool, Pool))
        return spare + sum(engine.staged_bytes for engine in self._engines)

    def _keep(self, tier: int, pool: Recalled) -> None:
        """Call `Recalled.keep` within the deadline. A hung thread is not joined."""
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
    """Call `NotesUses.note_uses` and only log a failure, since no block is lost."""
    try:
        pool.note_uses(index)
    except Exception as error:  # noqa: BLE001 - a custom storage may raise anything
        _LOG.warning("uses of %d blocks were not written down: %s", len(index), error)


def _look(manager: BlockManager, pools: Sequence[TierBytes]) -> None:
    """Raise if the first pool with a format does not match the manager's model."""
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
