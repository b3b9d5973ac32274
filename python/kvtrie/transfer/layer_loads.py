"""LayerLoads: loads the blocks of a lease, layer by layer.

A block from a storage is read into host memory and copied on to the first tier in the same pass,
layer by layer. The second copy does not wait for the end of the first copy.
Invariant: a layer is present when every move awaited by the lease has copied it. Aborted or failed
loads give every move back, without blame for layers not copied.
Cost: per layer a call on the load stream and a few array operations, independent of the number of
blocks in memory. Per block on a storage, a read per layer.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvtrie.errors import ConfigError, TransferError
from kvtrie.tiers import Pool
from kvtrie.transfer.connector import BufferedConnector
from kvtrie.transfer.feedback import LayerArrival
from kvtrie.transfer.job import read_together
from kvtrie.transfer.job_state import JobState
from kvtrie.transfer.layer_copies import LayerCopies
from kvtrie.transfer.stream import Stream

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from numpy.typing import NDArray

    from kvtrie import Lease
    from kvtrie.transfer.claims import Claims
    from kvtrie.transfer.connector import LayerBuffer, PagedConnector
    from kvtrie.transfer.executor import Executor
    from kvtrie.transfer.job import Job
    from kvtrie.transfer.layer_order import LayerOrder
    from kvtrie.transfer.stream import Current, StreamEvent

__all__ = ["LayerGet", "LayerLoads"]


class _UnprovedError(TransferError):
    """A block of an earlier process is damaged."""


class LayerGet:
    """A layer of many blocks being read from storages into host memory.

    Each reader reads its share of the blocks, after the shares of earlier layers.

    Attributes:
        error: the first error of a read, or None without an error.
    """

    def __init__(
        self,
        claims: Claims,
        readers: Sequence[Stream],
        shares: Sequence[Sequence[Job]],
        layer: int,
        order: LayerOrder,
    ) -> None:
        self._claims = claims
        self._layer, self._order = layer, order
        self._left = len(shares)
        self.error: BaseException | None = None
        self._jobs = [job for share in shares for job in share]
        for reader, share in zip(readers, shares, strict=False):
            reader.submit(partial(self._read, share))

    @property
    def over(self) -> bool:
        """Whether every read has ended or hangs."""
        return not self._left or any(job.expired for job in self._jobs)

    def result(self) -> None:
        """Block until the layer is present.

        Raises:
            TransferError: a read failed, or hangs beyond the executor's deadline.
        """
        self._claims.until(lambda: self.over, f"layer {self._layer} is not read")
        if self._left:
            raise TransferError("a read hangs")
        if self.error is not None:
            raise self.error

    def _read(self, share: Sequence[Job]) -> None:
        left = list(share)
        while left and self.error is None and not left[0].expired:
            together = 1
            if left[0].batchable:
                joins = (at for at, job in enumerate(left) if job.expired or not job.joins(left[0]))
                together = next(joins, len(left))
            now, left = left[:together], left[together:]
            for job in now:
                self._claims.copying(job)
            for job, error in zip(now, self._errors(now), strict=True):
                brought = 0 if error else job.bytes // (job.layers[1] - job.layers[0])
                self._claims.copied(job, brought, self._order.at(job, self._layer) + 1)
                if error is not None:
                    self.error = self.error or error
                    if not job.over:
                        self._claims.end(job, f"{type(error).__name__}: {error}")
                elif job.state is JobState.LATE:
                    self._claims.end(job)
        self._claims.update(self._done)

    def _errors(self, jobs: Sequence[Job]) -> Sequence[BaseException | None]:
        """Read the layer of some blocks in a call and return the error of each block or None."""
        try:
            if len(jobs) == 1:
                jobs[0].read_layer(self._order.at(jobs[0], self._layer))
                return [None]
            errors = read_together(jobs, self._order.at(jobs[0], self._layer))
        except BaseException as caught:  # noqa: BLE001 - raised by `result`
            return [caught] * len(jobs)
        return [None if why is None else TransferError(why) for why in errors]

    def _done(self) -> None:
        self._left -= 1


class LayerLoads:
    """The loads of a lease.

    Args:
        executor: the executor of the moves.
        lease: a lease made by `Claims.acquire`. A lease made elsewhere waits for foreign copies.
        load: the stream for the copies.
        connector: makes the copies.
        order: the layers of each group.
        readers: number of threads reading from storages.
        rush: completes all begun blocks of all leases, on the load stream.
        help_on: makes the loads of some leases, or the executor, copy a layer.

    Attributes:
        tokens: the hit count in tokens, as planned.
        issued: number of layers in flight or complete.
    """

    def __init__(
        self,
        executor: Executor,
        lease: Lease,
        load: Stream,
        connector: PagedConnector,
        *,
        order: LayerOrder,
        readers: int,
        rush: Callable[[], None],
        help_on: Callable[[Collection[int], int], None],
    ) -> None:
        self._rush = rush
        self._help = help_on
        self._executor = executor
        self._claims = executor.claims
        self._load = load
        self._connector = connector
        self.lease = lease
        self.tokens = lease.matched
        self._order, self.layers = order, order.layers
        self.issued = 0
        self._events: list[StreamEvent] = []
        self._buffers: dict[int, LayerBuffer] = {}
        self._copies: dict[Job, LayerCopies] = {}
        self._reads: dict[int, list[LayerGet]] = {}
        self._read_to: dict[Job, int] = {}
        self._next: dict[Job, int] = {}
        self._mine: list[NDArray[np.uint64]] = []
        self._most = readers
        self._readers: list[Stream] = []
        self._table: torch.Tensor | None = None
        self._error: BaseException | None = None
        self._closed = False
        self._issuing = threading.Lock()  # no read begins while moves are cancelled
        self._holes = len(lease.plan.recompute())
        self._jobs = self._news()
        self._foreign = self._others()
        self._independent = not self._foreign  # otherwise `buffer` gathers a layer after `wait`
        plan = lease.plan
        # A plan predicts the layers of the first group.
        predicts = bool(self._jobs) and self.layers == connector.pool.layers
        self._predicted = [plan.ready(layer) for layer in range(self.layers)] if predicts else []

    def issue(self, layers: int) -> None:
        """Start the loads of all layers below `layers`, in order."""
        with self._issuing:
            order = self._order
            for layer in range(self.issued, min(layers, self.layers)):
                # `_bring` reads the job if it could not begin earlier and lacks previous layers.
                reads = [
                    job
                    for job in self._jobs
                    if _stored(job)
                    and order.place(job, layer) == self._read_to.get(job, job.layers[0])
                    and not job.over
                    and self._starts(job)
                ]
                if reads:
                    self._read(reads, layer)
                self._events.append(self._submit(partial(self._bring, layer)))
                self.issued = layer + 1

    def layerwise_batched_get(self, jobs: Sequence[Job], layer: int) -> LayerGet:
        """Start reading a layer of many blocks into host memory. `result()` waits for it."""
        if not self._readers:
            count, host = min(self._most, len(jobs)), torch.device("cpu")
            self._readers = [Stream(f"kvtrie-read-{at}", host) for at in range(count)]
        shares = [jobs[at :: len(self._readers)] for at in range(len(self._readers))]
        shares = [one for one in shares if one]
        return LayerGet(self._claims, self._readers, shares, layer, self._order)

    def wait(self, layer: int, current: Current, *, last: bool = True) -> None:
        """Make the computation wait for a layer.

        Args:
            layer: the layer, already issued.
            current: the caller's stream.
            last: whether to wait for this request's copies. False if the caller has waited for a
                later request of the batch.

        Raises:
            TransferError: the layer cannot be loaded.
        """
        for passed in [at for at in self._buffers if at < layer]:
            self._take_back(passed)
        if last:
            current.wait(self._events[layer])
        if self._error is None and self._foreign:
            self._await_others(layer, current)
        if self._error is not None:
            raise TransferError(
                f"lease {self.lease.id}: layer {layer} of {self.layers} does not come: "
                f"{self._error}; release it and acquire again"
            ) from self._error

    def join(self) -> None:
        """Block until all issued loads are copied, or enqueued on the GPU."""
        if self._events:
            self._events[-1].join()

    def buffer(self, layer: int) -> LayerBuffer:
        """Return the match at a layer in a contiguous buffer, valid until the next `wait`.

        Raises:
            ConfigError: the connector has no buffers.
        """
        if not isinstance(self._connector, BufferedConnector):
            raise ConfigError("layers are laid out in buffers with blending=True only")
        if layer not in self._buffers:
            self._lay_out(layer)
        return self._buffers[layer]

    def finish(self) -> None:
        """Block until all loads of the lease have ended."""
        self._events[-1].join()
        self._executor.wait(self.lease)

    def close(self) -> None:
        """Cancel the unended moves. The manager may plan them again."""
        if self._closed:
            return
        self._closed = True
        if self._error is None:
            self._error = TransferError("the loads were abandoned")
        self._load.submit(self._load.finish_device_work).join()
        self._give_back()
        hung = any(job.expired for job in self._read_to)
        for reader in self._readers:
            reader.close(wait=not hung)
        for layer in list(self._buffers):
            self._take_back(layer)

    def _give_back(self) -> None:
        """Cancel the unended moves, once no read and no copy uses their slots."""
        with self._issuing:
            self._join_reads()
            for job in (*self._jobs, *self._claims.claim(self.lease.id)):
                if job.state in (JobState.IDLE, JobState.COPYING):
                    self._claims.end(job, "the loads of its lease were closed", cancelled=True)
                elif job.state is JobState.WAITING:
                    self._executor.cancel(job.ids)
            self._jobs = []
            self._claims.disclaim(self.lease.id)

    def _join_reads(self) -> None:
        """Block until every read has ended or hangs."""
        reads = [get for gets in self._reads.values() for get in gets]
        try:
            self._claims.until(lambda: all(read.over for read in reads), "reads do not end")
        except TransferError:
            # Reads with only failed moves return soon by themselves.
            for reader in self._readers:
                reader.synchronize()
            if not all(read.over for read in reads):
                raise

    def _submit(self, call: Callable[[], None]) -> StreamEvent:
        return self._load.submit(partial(self._guarded, call), wake=False)

    def _guarded(self, call: Callable[[], None]) -> None:
        """Run a call on the load stream and record its error."""
        if self._error is not None:
            return
        try:
            call()
        except BaseException as caught:  # noqa: BLE001 - raised by `wait`
            self._error = caught
            # The lease's pass may never come, and other leases wait for these moves.
            with suppress(TransferError):
                self._load.finish_device_work()
                self._give_back()

    def _starts(self, job: Job) -> bool:
        """Begin a job if it may start at once and return whether it has begun."""
        if not job.begun and self._claims.startable(job):
            self._begin(job)
        return job.begun

    def _begin(self, job: Job) -> None:
        """Begin a job, after blocking until it may start."""
        if job.begun:
            return
        # Its `after` may belong to a claimed job with layers not yet requested: finish that job.
        if job.after and self._claims.leases_of([job.after]):
            self._rush()
        if not self._claims.begin(job):
            reads = [get.error for gets in self._reads.values() for get in gets if get.error]
            raise reads[0] if reads else TransferError("the move that it waited for has failed")

    def _read(self, jobs: Sequence[Job], layer: int) -> None:
        """Start reading a layer of begun jobs."""
        for job in jobs:
            self._read_to[job] = self._order.at(job, layer) + 1
        self._reads.setdefault(layer, []).append(self.layerwise_batched_get(jobs, layer))

    def _bring(self, layer: int) -> None:
        """Load a layer of all blocks, and earlier layers of late blocks, on the load stream."""
        self._jobs = [job for job in self._jobs if not job.over]
        for job in list(self._jobs):
            if _stored(job) and self._order.place(job, layer) is not None:
                self._begin(job)
        self._advance([job for job in self._jobs if not job.over], layer)
        if isinstance(self._connector, BufferedConnector) and self._independent:
            self._lay_out(layer)
        # On a GPU the end of the copies is known only after synchronizing the stream.
        if self._predicted and (self._load.cuda is None or layer == self.layers - 1):
            now = self._executor.clock()
            arrival = LayerArrival(self.lease.id, layer, self._predicted[layer], now)
            self._executor.feedback.record_arrival(arrival)

    def hasten(self) -> None:
        """Load all layers of begun jobs for waiting leases, on the load stream."""
        self._guarded(self._hasten)

    def _hasten(self) -> None:
        able = [job for job in self._jobs if not job.over and (not _stored(job) or job.begun)]
        read = {ident for job in able if _stored(job) for ident in job.ids.tolist()}
        able = [job for job in able if _stored(job) or job.after in read or self._starts(job)]
        self._advance(able, self.layers - 1)

    def _advance(self, jobs: Sequence[Job], layer: int) -> None:
        """Load jobs up to a layer. Jobs with reads have begun."""
        order, ahead = self._order, self._next
        first = min((ahead.get(job, order.first(job)) for job in jobs), default=layer + 1)
        for at in range(first, layer + 1):
            jobs_of_layer = [
                job
                for job in jobs
                if order.place(job, at) is not None and ahead.get(job, at) <= at and not job.over
            ]
            self._bring_layer(jobs_of_layer, at)

    def _bring_layer(self, jobs: Sequence[Job], layer: int) -> None:
        stored, memory = [job for job in jobs if _stored(job)], jobs
        read: set[int] = set()
        if stored:
            late = [
                job
                for job in stored
                if self._read_to.get(job, job.layers[0]) <= self._order.at(job, layer)
            ]
            if late:
                self._read(late, layer)
            read = {ident for job in stored for ident in job.ids.tolist()}
            memory = [job for job in jobs if not _stored(job)]
        for get in self._reads.pop(layer, ()):
            get.result()
        for job in memory:
            if job.after not in read:
                self._begin(job)
        self._copy(memory, layer)
        ended = [job for job in jobs if job.layers[1] == self._order.at(job, layer) + 1]
        if ended:
            self._load.finish_device_work()
        # The manager accepts the end of a copy only after the end of the read before it.
        for job in sorted(ended, key=_stored, reverse=True):
            self._begin(job)
            self._claims.end(job)
            self._copies.pop(job, None)
        for job in jobs:
            self._next[job] = layer + 1

    def _copy(self, memory: Sequence[Job], layer: int) -> None:
        for job in memory:
            self._claims.copying(job)
        came, begin = False, self._load.mark()
        each = [job.bytes // (job.layers[1] - job.layers[0]) for job in memory]
        try:
            for job in memory:
                if job not in self._copies:
                    self._verify_source(job)
            for job in memory:
                at = self._order.at(job, layer) - job.layers[0]
                self._copies_of(job).copy(at, at + 1)
            came = True
            if begin is not None and memory:
                report = partial(self._claims.record_copy_time, memory[0], sum(each))
                self._load.measure(begin, report)
        except BaseException as caught:
            # The moves of damaged blocks have failed. The remaining moves may be planned again.
            blameless = isinstance(caught, _UnprovedError)
            for job in memory:
                if job.begun:
                    error = f"{type(caught).__name__}: {caught}"
                    self._claims.end(job, error, cancelled=blameless)
            raise
        finally:
            for job, size in zip(memory, each, strict=True):
                handed = begin is not None
                upto = self._order.at(job, layer) + 1
                self._claims.copied(job, size if came else 0, upto, handed=handed)

    def _verify_source(self, job: Job) -> None:
        """Verify the blocks of a kept source from an earlier process.

        Raises:
            _UnprovedError: a block is damaged, and its move was reported failed.
        """
        reasons = self._claims.verify_source(job)
        if reasons:
            raise _UnprovedError(reasons[0])

    def _copies_of(self, job: Job) -> LayerCopies:
        source, pool = job.source, job.target
        assert isinstance(source, Pool) and isinstance(pool, Pool)  # noqa: S101, PT018 - not read
        if job not in self._copies:
            self._copies[job] = LayerCopies.of_slots(
                source, pool, job.slots, job.layers, copy=self._connector.copy
            )
        return self._copies[job]

    def _news(self) -> list[Job]:
        """Claim the loads issued since the last call."""
        jobs = self._claims.claim(self.lease.id)
        self._mine += [job.ids for job in jobs]
        return jobs

    def _others(self) -> set[int]:
        """Return the awaited moves executed by foreign jobs."""
        awaited = self.lease.after
        if len(self._mine) == 1 and np.array_equal(awaited, self._mine[0]):
            return set()
        return set[int](awaited.tolist()).difference(*(ids.tolist() for ids in self._mine))

    def _await_others(self, layer: int, current: Current) -> None:
        """Wait for a layer of foreign moves, of stores that free a slot, and of late own loads."""
        claims, lease = self._claims, self.lease
        while self._error is None:
            if news := self._news():
                late = partial(self._take_late, news, self.issued - 1)
                self._load.submit(late, wake=False).join()
            if self._foreign_layer_copied(layer):
                break
            if others := claims.leases_of(self._foreign):
                self._help(others, layer)
            claims.until(
                lambda: (
                    claims.claimable(lease.id)
                    or self._foreign_layer_copied(layer)
                    or claims.stalled(self._foreign)
                    # A failed load may be planned again for a lease awaited by this lease.
                    or any(map(claims.claimable, claims.leases_of(self._foreign)))
                ),
                f"lease {lease.id} awaits moves that no thread carries out",
            )
            if claims.stalled(self._foreign):
                # Slots in transit are short: complete the partially loaded blocks first.
                self._submit(self._rush).join()
        holes = len(lease.plan.recompute())
        if self._error is None and (lease.matched < self.tokens or holes > self._holes):
            self._error = TransferError(
                f"{lease.matched} of {self.tokens} tokens are left, {holes} to be computed"
            )
        current.wait(self._load.submit(lambda: None))

    def _foreign_layer_copied(self, layer: int) -> bool:
        """Return whether the foreign moves have loaded a layer."""
        self._foreign = self._others()
        return self._claims.layer_copied(self._foreign, layer, self._order)

    def _take_late(self, jobs: list[Job], layer: int) -> None:
        """Load late jobs up to a layer on the load stream, and cancel all jobs after an error."""
        self._guarded(partial(self._catch_up, jobs, layer))
        self._jobs += [job for job in jobs if not job.over]
        if self._error is not None:
            with suppress(TransferError):
                self._give_back()

    def _catch_up(self, jobs: list[Job], layer: int) -> None:
        """Load late jobs up to the layer reached by the earlier jobs, on the load stream."""
        for job in jobs:
            if _stored(job):
                self._begin(job)
        self._advance(jobs, layer)

    def _lay_out(self, layer: int) -> None:
        assert isinstance(self._connector, BufferedConnector)  # noqa: S101 - its callers look
        pool = self._connector.pool
        if self._table is None:
            blocks = self.tokens // pool.block_tokens
            self._table = pool.table(self.lease.slots(0))[:, :blocks]
        self._buffers[layer] = self._connector.lay_out(self._table[layer], self.tokens)

    def _take_back(self, layer: int) -> None:
        assert isinstance(self._connector, BufferedConnector)  # noqa: S101 - only it makes buffers
        self._connector.take_back(self._buffers.pop(layer))


def _stored(job: Job) -> bool:
    """Return whether a job reads from a storage."""
    return not isinstance(job.source, Pool)
