"""Job: a few moves executed together by one thread.

Independent moves between two pools share a job, so that layer 0 of all blocks is copied before
layer 1 of any block. Single layers of a block bound for a storage share a job, so that a single
call writes them. Every remaining move has a separate job.
A lease's engine may claim its loads and execute them layer by layer. Claimed loads do not share a
job with unclaimed moves.
Invariant: all moves of a job have the same source tier, destination tier and number of layers.
Cost: a grouping call for all moves between pools, and a step per dependent move or storage
move. No call into the manager.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache, partial
from inspect import signature
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

from kvtrie.errors import InvariantError, TransferError
from kvtrie.tiers import Batched, HasBlockFormat, KeptPool, Pool, in_memory, parts_of
from kvtrie.transfer.job_state import TRANSITIONS, JobState
from kvtrie.transfer.layer_copies import LayerCopies

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from typing import Any

    from numpy.typing import NDArray

    from kvtrie import Move, Moves
    from kvtrie.tiers import Storage, TierBytes

__all__ = ["Job", "Place", "Urgency", "group", "read_together", "run_together", "takes_deadline"]

_LOAD, _STORE = 0, 1
_STAGING = threading.local()

Place: TypeAlias = tuple[int, int, int]
"""A slot of a storage: the numbers of the storage, of the group of layers and of the slot."""


class Urgency(IntEnum):
    """Start order of jobs, ascending."""

    DEMAND = 0
    """A lease waits for the job, directly or through another job."""
    PREFETCH = 1
    """A load without a waiting lease."""
    BACKGROUND = 2
    """A store without a waiting lease."""


@dataclass(slots=True, eq=False)
class Job:
    """Moves with the same kind of path, and the addresses of their bytes.

    Attributes:
        source: the pool or storage to copy from.
        target: the pool or storage to copy to.
        tiers: the indices of source and target tier, in the manager's order.
        ids: uint64, the moves' ids.
        store: whether the moves go to a slower tier.
        urgency: start order.
        place: the storage slot used exclusively by the job, or None between pools.
        after: the move to end well before this job may start, or 0 for none.
        group: the layer group of the moves.
        layers: the range of layers of every move; for single layers written together, the range of
            the first move in `firsts`.
        firsts: the first layer of each move.
        slots: int64 `(moves, 2)`, source and destination slot of each move.
        keys: 32 bytes per move, the name of the block on a storage.
        labels: the bytes kept by a storage with each block.
        event: on a GPU, the point of the compute stream to wait for before copying.
        state: progress, see `JobState`.
        started_ns: start of the copy, valid only while the job is COPYING.
        worker: the executing thread, or None for the caller's thread.
        lease: the lease of the engine executing the job layer by layer, or 0 for the executor's
            threads.
        there: number of leading layers present; 0 before the first layer.
    """

    source: Pool | Storage
    target: Pool | Storage
    tiers: tuple[int, int] = (0, 1)
    ids: NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, dtype=np.uint64))
    store: bool = False
    urgency: Urgency = Urgency.DEMAND
    place: Place | None = None
    after: int = 0
    group: int = 0
    layers: tuple[int, int] = (0, 0)
    firsts: list[int] = field(default_factory=list[int])
    slots: NDArray[np.int64] = field(default_factory=lambda: np.empty((0, 2), dtype=np.int64))
    keys: list[bytes] = field(default_factory=list[bytes])
    labels: list[bytes] = field(default_factory=list[bytes])
    event: torch.Event | None = None
    state: JobState = JobState.WAITING
    started_ns: int = 0
    worker: threading.Thread | None = None
    lease: int = 0
    copied_to: int = 0
    _copy: tuple[tuple[int, int], torch.Tensor] | None = None

    def go(self, state: JobState) -> None:
        """Change the state.

        Raises:
            InvariantError: the transition is not in the table.
        """
        if state not in TRANSITIONS[self.state]:
            raise InvariantError(
                f"a job of {len(self.ids)} moves cannot go from {self.state.value} to {state.value}"
            )
        self.state = state

    @property
    def storage(self) -> int | None:
        """The storage read or written by the job, or None between pools."""
        return None if self.place is None else self.place[0]

    @property
    def begun(self) -> bool:
        """Whether the job has left the queue to run."""
        return self.state is not JobState.WAITING and self.state is not JobState.LOST

    @property
    def expired(self) -> bool:
        """Whether the job was reported failed at its deadline."""
        return self.state is JobState.LATE or self.state is JobState.EXPIRED

    @property
    def over(self) -> bool:
        """Whether the job has run and ended."""
        return self.state is JobState.ENDED or self.state is JobState.EXPIRED

    @property
    def bytes(self) -> int:
        """Bytes to copy, in the format of the lower tier, as transferred over the lane."""
        lower, upper = (self.target, self.source) if self.store else (self.source, self.target)
        pool = lower if isinstance(lower, Pool) else upper
        if not isinstance(pool, Pool):
            return 0
        lo, hi = self.layers
        return len(self.ids) * (hi - lo) * pool.unit_bytes

    def drop(self, ident: int) -> None:
        """Remove a move from a job not yet started."""
        at = int(np.flatnonzero(self.ids == ident)[0])
        self.ids, self.slots = np.delete(self.ids, at), np.delete(self.slots, at, axis=0)
        for column in (self.firsts, self.keys, self.labels):
            if column:
                del column[at]

    def adjoins(self, layers: tuple[int, int]) -> bool:
        """Return whether a range is a single layer next to this job's single layers."""
        single = all(hi - lo == 1 for lo, hi in (self.layers, layers))
        return single and layers[0] in {min(self.firsts) - 1, max(self.firsts) + 1}

    def add(self, move: Move) -> None:
        """Add a dependent move or a storage move."""
        self.urgency = min(self.urgency, _urgency(move))
        ids = np.array([move.id], dtype=np.uint64)
        slots = np.array([[move.src_slot, move.dst_slot]], dtype=np.int64)
        more = bool(len(self.ids))
        self.ids = np.concatenate((self.ids, ids)) if more else ids
        self.slots = np.concatenate((self.slots, slots)) if more else slots
        self.firsts.append(move.layer_lo)
        self.keys.append(move.key)
        self.labels.append(move.label)

    def verify_source(self) -> dict[int, str]:
        """Verify the blocks kept in the source by an earlier process.

        Returns:
            By move, the reason for a miss.
        """
        if not isinstance(self.source, KeptPool):
            return {}
        found = self.source.verify(self.slots[:, 0], self.keys)
        return {int(self.ids[at]): why for at, why in found.items()}

    def mark(self) -> dict[int, str]:
        """Mark the blocks in a kept target as being written.

        Returns:
            By move, the reason against writing its block.
        """
        if not isinstance(self.target, KeptPool):
            return {}
        found = self.target.begin(self.slots[:, 1], self.keys, self.layers)
        return {int(self.ids[at]): why for at, why in found.items()}

    def record_end(self, *, ok: bool) -> None:
        """Record in a kept target the end of the copies."""
        if isinstance(self.target, KeptPool) and len(self.ids):
            self.target.finish(self.slots[:, 1], self.keys, self.labels, ok=ok)

    def copy_source(self) -> None:
        """Copy the source of a storage write out of the first tier.

        After a move is reported failed, a lease may overwrite its slot even while the move hangs. A
        storage reading the slot by then would keep wrong bytes under the block's key.
        """
        if not self.store or self.tiers[0] or isinstance(self.target, Pool):
            return
        if isinstance(self.source, Pool):
            layers, memory = self._from(self.source)
            self._copy = layers, memory.to("cpu", copy=True)

    def run(self, layers_per_report: int) -> Iterator[int]:
        """Copy the bytes, front layers first.

        Yields:
            The number of copied layers of every move. On a GPU the count is final once the stream
            is idle.
        """
        lo, hi = self.layers
        if not (isinstance(self.source, Pool) and isinstance(self.target, Pool)):
            self._through_storage()
            yield hi - lo
            return
        copies = LayerCopies.of_slots(self.source, self.target, self.slots, self.layers)
        for first in range(0, hi - lo, layers_per_report):
            upto = min(hi - lo, first + layers_per_report)
            copies.copy(first, upto)
            yield upto

    @property
    def batchable(self) -> bool:
        """Whether the storage can move the block together with further blocks in a single call."""
        pool, storage = (self.source, self.target) if self.store else (self.target, self.source)
        return (
            len(self.ids) == 1
            and isinstance(pool, Pool)
            and pool.device.type == "cpu"
            and len(pool.planes) == 1
            and not isinstance(storage, Pool)
            and _is_batched(type(storage))
        )

    def joins(self, first: Job) -> bool:
        """Return whether the job may share a storage call with a batchable job."""
        same = self.source is first.source and self.target is first.target
        return same and self.urgency == first.urgency and self.batchable

    def row(self, layers: tuple[int, int] | None = None) -> tuple[Any, ...]:
        """Return the block's arguments for `Batched.read_many`, for all layers or a range."""
        pool = self.source if self.store else self.target
        if not isinstance(pool, Pool):
            raise TransferError("a move has a pool on at least one side")
        source, target = self.slots[0].tolist()
        layers = layers or self.layers
        if self.store:
            layers, memory = self._from(pool)
        else:
            memory = pool.layer_bytes(target, layers)
        return self.keys[0], target if self.store else source, layers, memory

    def read_layer(self, layer: int) -> None:
        """Read a layer of a block from a storage into the target's memory."""
        self._read((layer, layer + 1))

    def _read(self, layers: tuple[int, int]) -> None:
        """Read layers of the block from the storage into the target's memory."""
        if isinstance(self.source, Pool) or not isinstance(self.target, Pool):
            raise TransferError("a layer is read from a storage into a pool")
        key, slot, _, memory = self.row(layers)
        self.source.read(key, slot, layers, memory)
        planes, start = self.target.planes, 0
        if len(planes) > 1:  # `memory` is a copy
            units = torch.as_tensor(self.target.units(int(self.slots[0, 1]), *layers))
            for plane in planes:
                end = start + plane.shape[1]
                plane[units] = memory[:, start:end].to(plane.device)
                start = end

    def _through_storage(self) -> None:
        if isinstance(self.source, Pool) and not isinstance(self.target, Pool):
            layers, memory = self._from(self.source)
            self.target.write(self.keys[0], int(self.slots[0, 1]), layers, memory, self.labels[0])
        elif isinstance(self.target, Pool) and not isinstance(self.source, Pool):
            self._read(self.layers)
        elif not isinstance(self.source, Pool) and not isinstance(self.target, Pool):
            self._between(self.source, self.target)

    def _between(self, source: Storage, target: Storage) -> None:
        """Copy between two storages, through host memory."""
        if not isinstance(source, HasBlockFormat):
            raise TransferError("a storage without a block format cannot be copied to another one")
        layers, (read, written) = self.layers, self.slots[0].tolist()
        size = layers[1] - layers[0], source.block_format.unit_bytes
        memory = torch.empty(size, dtype=torch.uint8)
        source.read(self.keys[0], read, layers, memory)
        target.write(self.keys[0], written, layers, memory, self.labels[0])

    def _from(self, pool: Pool) -> tuple[tuple[int, int], torch.Tensor]:
        """Return the layers to write to a storage, and their bytes."""
        if self._copy is not None:
            return self._copy
        if len(self.ids) > 1:
            return self._joined(pool)
        return self.layers, pool.layer_bytes(int(self.slots[0, 0]), self.layers)

    def _joined(self, pool: Pool) -> tuple[tuple[int, int], torch.Tensor]:
        """Return single layers of a block in a contiguous buffer, reused by the next job."""
        rows = sorted(zip(self.firsts, self.slots[:, 0].tolist(), strict=True))
        lo, hi = rows[0][0], rows[-1][0] + 1
        units = np.concatenate([pool.units(slot, layer, layer + 1) for layer, slot in rows])
        plane, *others = pool.planes
        if others:
            at = torch.as_tensor(units)
            return (lo, hi), torch.cat([each[at] for each in pool.planes], dim=1)
        staging: torch.Tensor | None = getattr(_STAGING, "memory", None)
        if staging is None or staging.shape[1] != plane.shape[1] or len(staging) < len(units):
            staging = _STAGING.memory = torch.empty(
                (pool.layers, plane.shape[1]), dtype=torch.uint8
            )
        memory = staging[: len(units)]
        torch.index_select(plane, 0, torch.as_tensor(units), out=memory)
        return (lo, hi), memory


def run_together(jobs: Sequence[Job], deadline: int | None = None) -> list[str | None]:
    """Move the blocks of jobs in a single storage call.

    Args:
        jobs: the jobs. All join the first job.
        deadline: end of the whole call in nanoseconds of `time.monotonic_ns`, for a storage with
            deadlines, or None for no limit.

    Returns:
        The error of each job, or None.
    """
    first = jobs[0]
    if first.store and isinstance(first.target, Batched):
        write = _timed(first.target, first.target.write_many, deadline)
        return write([(*job.row(), job.labels[0]) for job in jobs])
    if not first.store and isinstance(first.source, Batched):
        read = _timed(first.source, first.source.read_many, deadline)
        return read([job.row() for job in jobs])
    raise TransferError("this storage moves one block a call")


@cache
def _is_batched(kind: type[Storage]) -> bool:
    # Called for each block, and a protocol check takes 15 µs.
    return issubclass(kind, Batched)


def takes_deadline(storage: object) -> bool:
    """Return whether a storage takes a deadline for a whole call of several blocks."""
    return isinstance(storage, Batched) and _has_deadline(type(storage))


@cache
def _has_deadline(kind: type[Batched]) -> bool:
    calls = (kind.read_many, kind.write_many)
    return all("deadline" in signature(call).parameters for call in calls)


def _timed(
    storage: Batched, call: Callable[..., list[str | None]], deadline: int | None
) -> Callable[..., list[str | None]]:
    return partial(call, deadline=deadline) if takes_deadline(storage) else call


def read_together(jobs: Sequence[Job], layer: int) -> list[str | None]:
    """Read a layer of the blocks of jobs in a single storage call.

    Returns:
        The error of each job, or None.
    """
    source = jobs[0].source
    if not isinstance(source, Batched):
        raise TransferError("this storage moves one block a call")
    return source.read_many([job.row((layer, layer + 1)) for job in jobs])


def group(
    moves: Moves,
    tiers: Sequence[TierBytes],
    unended: Callable[[set[int]], set[int]],
    limit: int,
    claimed: Collection[int] = (),
) -> list[Job]:
    """Group moves into jobs, in an order that respects every `after`.

    Args:
        moves: moves of the manager, in its order.
        tiers: the pool or storage of each tier.
        unended: returns the unended moves among some earlier moves.
        limit: maximum number of moves per job. Claimed loads are not limited.
        claimed: leases with loads claimed by an engine.
    """
    memory = [at for at, tier in enumerate(tiers) if in_memory(tier)]
    parts, others = moves.together(memory)
    jobs: list[Job] = []
    for part in parts:
        ids, slots, first = part.id, _slots(part), part[0]
        most = len(ids) if _claimer(first, claimed) else limit
        for at in range(0, len(ids), most):
            job = _job(first, tiers, claimed)
            job.ids, job.slots = ids[at : at + most], slots[at : at + most]
            if isinstance(job.source, KeptPool) or isinstance(job.target, KeptPool):
                job.keys = [key.tobytes() for key in part.key[at : at + most]]
                job.labels = part.label[at : at + most]
            jobs.append(job)
    awaited = {move.after for move in others} - {0}
    left = unended(awaited) | awaited.intersection(moves.id.tolist()) if awaited else awaited
    down: dict[tuple[object, ...], Job] = {}
    for move in others:
        job = _job(move, tiers, claimed)
        job.after = move.after if move.after in left else 0
        if not (isinstance(job.source, Pool) and isinstance(job.target, Pool)):
            slot = move.dst_slot if job.store else move.src_slot
            job.place = (job.tiers[job.store], move.group, slot)
            # Single layers of a block are written in a single call.
            way = (*job.tiers, move.group, slot, move.key, job.after)
            if job.store:
                before = down.get(way)
                job = before if before is not None and before.adjoins(job.layers) else job
                down[way] = job
        if not len(job.ids):
            jobs.append(job)
        job.add(move)
    return jobs


def _claimer(move: Move, claimed: Collection[int]) -> int:
    return move.lease if move.kind == _LOAD and move.lease in claimed else 0


def _urgency(move: Move) -> Urgency:
    if move.lease:
        return Urgency.DEMAND
    return Urgency.BACKGROUND if move.kind == _STORE else Urgency.PREFETCH


def _job(move: Move, tiers: Sequence[TierBytes], claimed: Collection[int]) -> Job:
    """Return a job without moves, for the path of a move."""
    return Job(
        parts_of(tiers[move.src])[move.group],
        parts_of(tiers[move.dst])[move.group],
        (move.src, move.dst),
        store=move.kind == _STORE,
        urgency=_urgency(move),
        group=move.group,
        layers=(move.layer_lo, move.layer_hi),
        lease=_claimer(move, claimed),
    )


def _slots(moves: Moves) -> NDArray[np.int64]:
    return np.array((moves.src_slot, moves.dst_slot), dtype=np.int64).T
