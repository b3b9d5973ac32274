"""Job: a few moves that one thread carries out together.

Moves between two pools that are free to run share a job, so that layer 0 of all of them is there
before layer 1 of any; a move that waits for another, or touches a storage, is a job of its own.
Invariant: all moves of a job have the same source tier, destination tier and number of layers.
Cost: grouping is one pass over the columns of the moves, without a call into the manager.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

from kvtrie.errors import TransferError
from kvtrie.tiers import Pool, Storage

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator, Sequence

    import torch
    from numpy.typing import NDArray

    from kvtrie import Moves

__all__ = ["Job", "Urgency", "group"]

_STORE = 1


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
        urgency: when it starts.
        after: the move that must end well before this job may start; 0 for none.
        layers: the range of layers, for one move or for all of them.
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
    urgency: Urgency = Urgency.DEMAND
    after: int = 0
    layers: tuple[int, int] = (0, 0)
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
        for column in (self.ids, self.slots, self.keys, self.labels):
            del column[at]

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
        ((source, target),) = self.slots
        (key,), (label,) = self.keys, self.labels
        if isinstance(self.source, Pool) and not isinstance(self.target, Pool):
            memory = self._memory(self.source, source)
            self.target.write(key, target, self.layers, memory, label)
        elif isinstance(self.target, Pool) and not isinstance(self.source, Pool):
            self.source.read(key, source, self.layers, self._memory(self.target, target))
        else:
            raise TransferError("a move has a pool on at least one side")

    def _memory(self, pool: Pool, slot: int) -> torch.Tensor:
        if len(pool.planes) != 1:
            raise TransferError("a storage exchanges bytes with joined layouts only")
        units = self._units(pool, slot)
        return pool.planes[0][int(units[0]) : int(units[-1]) + 1]


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
    open_jobs: dict[tuple[int, ...], Job] = {}
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
        waits = after in pending
        alone = waits or not (isinstance(source, Pool) and isinstance(target, Pool))
        urgency = Urgency.BACKGROUND if kind == _STORE else Urgency.PREFETCH
        if lease:
            urgency = Urgency.DEMAND
        way = (src, dst, lo, hi, urgency)
        job = None if alone else open_jobs.get(way)
        if job is None or len(job.ids) == limit:
            job = Job(source, target, urgency=urgency, layers=(lo, hi))
            job.after = after if waits else 0
            jobs.append(job)
            if not alone:
                open_jobs[way] = job
        job.ids.append(ident)
        job.slots.append((src_slot, dst_slot))
        job.keys.append(key.tobytes())
        job.labels.append(label)
        pending.add(ident)
    return jobs
