"""Job: a few moves that one thread carries out together.

Moves between two pools that are free to run share a job, so that layer 0 of all of them is there
before layer 1 of any. Single layers of one block that go to a storage share one, so that they are
written at once. Any other move that waits for another, or touches a storage, is a job of its own.
Invariant: all moves of a job have the same source tier, destination tier and number of layers.
Cost: grouping is one pass over the columns of the moves, without a call into the manager.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

from kvtrie.errors import TransferError
from kvtrie.tiers import Pool, Storage

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from kvtrie import Moves

__all__ = ["Job", "Place", "Urgency", "group"]

_STORE = 1
_STAGING = threading.local()

Place: TypeAlias = tuple[int, int]
"""A slot of a storage: the storage's number and the slot's."""


class Urgency(IntEnum):
    """Which job starts first, ascending."""

    DEMAND = 0
    """A lease waits for it, or something that a lease waits for does."""
    PREFETCH = 1
    """A load that no lease asked for."""
    BACKGROUND = 2
    """A store that nothing waits for."""


@dataclass(slots=True, eq=False)
class Job:
    """Moves of one kind of way, with the addresses of their bytes.

    Attributes:
        source: the pool or storage to copy from, and `target` the one to copy to.
        ids: the moves' ids.
        store: whether they go to a slower tier.
        urgency: when it starts.
        place: the slot of a storage that it reads or writes, alone; None between pools.
        after: the move that must end well before this job may start; 0 for none.
        layers: the range of layers, for one move or for all of them; of single layers that are
            written at once, of the first in `firsts`.
        firsts: the first layer of each move.
        slots: source and destination slot of each move.
        keys: 32 bytes per move that name the block on a storage.
        labels: what a storage keeps beside each block.
        event: on a GPU, the point of the compute stream that the copy must not overtake.
        started_ns: when a thread took the job; None before.
        worker: that thread; None for the caller's own.
        failed: set once the job has been reported failed, though it may still run.
    """

    source: Pool | Storage
    target: Pool | Storage
    ids: list[int] = field(default_factory=list[int])
    store: bool = False
    urgency: Urgency = Urgency.DEMAND
    place: Place | None = None
    after: int = 0
    layers: tuple[int, int] = (0, 0)
    firsts: list[int] = field(default_factory=list[int])
    slots: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    keys: list[bytes] = field(default_factory=list[bytes])
    labels: list[bytes] = field(default_factory=list[bytes])
    event: torch.Event | None = None
    started_ns: int | None = None
    worker: threading.Thread | None = None
    failed: bool = False

    def drop(self, ident: int) -> None:
        """Take one move out of a job that has not started."""
        at = self.ids.index(ident)
        for column in (self.ids, self.firsts, self.slots, self.keys, self.labels):
            if column:
                del column[at]

    def adjoins(self, layer_lo: int, layer_hi: int) -> bool:
        """Whether this is a single layer next to the single layers of this job."""
        lo, hi = self.layers
        single = hi - lo == 1 == layer_hi - layer_lo
        return single and layer_lo in {min(self.firsts) - 1, max(self.firsts) + 1}

    def run(self, layers_per_report: int) -> Iterator[int]:
        """Copy the bytes, front layers first.

        Yields:
            How many layers of every move are done; on a GPU, once the stream is.
        """
        lo, hi = self.layers
        if not (isinstance(self.source, Pool) and isinstance(self.target, Pool)):
            self._through_storage()
            yield hi - lo
            return
        sources = np.stack([self._units(self.source, slot) for slot, _ in self.slots])
        targets = np.stack([self._units(self.target, slot) for _, slot in self.slots])
        for first in range(0, hi - lo, layers_per_report):
            piece = slice(first, first + layers_per_report)
            self.target.copy_from(
                self.source, sources[:, piece].reshape(-1), targets[:, piece].reshape(-1)
            )
            yield min(hi - lo, piece.stop)

    def _units(self, pool: Pool, slot: int) -> NDArray[np.int64]:
        return pool.units(slot, *self.layers)

    def _through_storage(self) -> None:
        source, target = self.slots[0]
        key, label = self.keys[0], self.labels[0]
        if isinstance(self.source, Pool) and not isinstance(self.target, Pool):
            if len(self.ids) == 1:
                memory = self._memory(self.source, source)
                self.target.write(key, target, self.layers, memory, label)
            else:
                layers, memory = self._joined(self.source)
                self.target.write(key, target, layers, memory, label)
        elif isinstance(self.target, Pool) and not isinstance(self.source, Pool):
            self.source.read(key, source, self.layers, self._memory(self.target, target))
        else:
            raise TransferError("a move has a pool on at least one side")

    def _joined(self, pool: Pool) -> tuple[tuple[int, int], torch.Tensor]:
        """Single layers of one block side by side, in memory that the next job uses again."""
        rows = sorted(zip(self.firsts, (slot for slot, _ in self.slots), strict=True))
        lo, hi = rows[0][0], rows[-1][0] + 1
        units = np.concatenate([pool.units(slot, layer, layer + 1) for layer, slot in rows])
        plane = _plane(pool)
        staging: torch.Tensor | None = getattr(_STAGING, "memory", None)
        if staging is None or staging.shape[1] != plane.shape[1] or len(staging) < len(units):
            staging = _STAGING.memory = torch.empty(
                (pool.layers, plane.shape[1]), dtype=torch.uint8
            )
        memory = staging[: len(units)]
        torch.index_select(plane, 0, torch.as_tensor(units), out=memory)
        return (lo, hi), memory

    def _memory(self, pool: Pool, slot: int) -> torch.Tensor:
        units = self._units(pool, slot)
        return _plane(pool)[int(units[0]) : int(units[-1]) + 1]


def _plane(pool: Pool) -> torch.Tensor:
    if len(pool.planes) != 1:
        raise TransferError("a storage exchanges bytes with joined layouts only")
    return pool.planes[0]


def group(
    moves: Moves, tiers: Sequence[Pool | Storage], pending: set[int], limit: int
) -> list[Job]:
    """Turn the columns of `moves` into jobs, in an order that respects every `after`.

    Args:
        moves: what the manager handed out.
        tiers: the pool or storage of each tier.
        pending: ids of moves that have not ended; the new ones are added.
        limit: the most moves of one job.
    """
    jobs: list[Job] = []
    open_jobs: dict[tuple[object, ...], Job] = {}
    rows = zip(
        moves.id.tolist(),
        moves.src.tolist(),
        moves.dst.tolist(),
        moves.src_slot.tolist(),
        moves.dst_slot.tolist(),
        moves.layer_lo.tolist(),
        moves.layer_hi.tolist(),
        moves.after.tolist(),
        moves.key,
        moves.label,
        moves.kind.tolist(),
        moves.lease.tolist(),
        strict=True,
    )
    for ident, src, dst, src_slot, dst_slot, lo, hi, after, key, label, kind, lease in rows:
        source = tiers[int(src)]
        target = tiers[int(dst)]
        pools = isinstance(source, Pool) and isinstance(target, Pool)
        store = kind == _STORE
        urgency = Urgency.BACKGROUND if store else Urgency.PREFETCH
        if lease:
            urgency = Urgency.DEMAND
        before = after if after in pending else 0
        way: tuple[object, ...] | None = None
        if store and not pools:
            way = (src, dst, dst_slot, key.tobytes(), before)
        elif pools and not before:
            way = (src, dst, lo, hi, urgency)
        job = None if way is None else open_jobs.get(way)
        if job is None or not (len(job.ids) < limit if pools else job.adjoins(lo, hi)):
            job = Job(source, target, store=store, after=before, layers=(lo, hi))
            if not pools:
                job.place = (int(dst), dst_slot) if store else (int(src), src_slot)
            jobs.append(job)
            if way is not None:
                open_jobs[way] = job
        job.urgency = min(job.urgency, urgency) if job.ids else urgency
        job.ids.append(ident)
        job.firsts.append(lo)
        job.slots.append((src_slot, dst_slot))
        job.keys.append(key.tobytes())
        job.labels.append(label)
        pending.add(ident)
    return jobs
