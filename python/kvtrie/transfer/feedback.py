"""Feedback: measures the speeds of lanes and the arrival times of layers.

A lane's speed is learned from its busy periods, the times with at least one running copy: their
length, bytes and number of copies. `time = copies × latency + bytes / bandwidth` is fitted by least
squares over the last periods, and the weight of a period decays with its age.
The manager also gets the measured busy time of each lane, independent of its declared speed.
Invariant: failed copies and periods below a minimum of bytes do not change the fit.
Cost: a few additions per copy, and a fit of two unknowns per busy period.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from kvtrie.errors import ClosedError, InvariantError

if TYPE_CHECKING:
    from kvtrie import BlockManager, Lane
    from kvtrie.transfer.job import Job

__all__ = ["Feedback", "LayerArrival"]

_NS = 1_000_000_000
_KEEP = 0.9  # weight kept by earlier periods at each new period
_COPIES = 16  # copies after which a period of a busy lane is closed
_BYTES = 1 << 20  # a smaller period measures the threads' overhead rather than the lane
_LAYERS = 4096


class LayerArrival(NamedTuple):
    """Predicted and real arrival time of a layer.

    Attributes:
        lease: the lease's id.
        layer: the layer.
        predicted_ns: arrival time predicted by the plan.
        seen_ns: real arrival time.
    """

    lease: int
    layer: int
    predicted_ns: int
    seen_ns: int


@dataclass(slots=True)
class _Sums:
    """Weighted sums over a lane's past busy periods, and the current period.

    `counted_to` is the end of the busy time already passed to the manager.
    """

    lane: Lane
    running: int = 0
    since: int = 0
    counted_to: int = 0
    copies: int = 0
    bytes: int = 0
    cc: float = 0.0
    cb: float = 0.0
    bb: float = 0.0
    ct: float = 0.0
    bt: float = 0.0

    def close(self, now: int) -> None:
        """Add the current busy period to the sums."""
        copies, size, took = self.copies, self.bytes, now - self.since
        self.copies, self.bytes, self.since = 0, 0, now
        self.add(copies, size, took)

    def add(self, copies: int, size: int, took: int) -> None:
        """Add a period of copies, bytes and nanoseconds, unless it has too few bytes."""
        if took <= 0 or size < _BYTES:
            return
        self.cc = _KEEP * self.cc + copies * copies
        self.cb = _KEEP * self.cb + copies * size
        self.bb = _KEEP * self.bb + size * size
        self.ct = _KEEP * self.ct + copies * took
        self.bt = _KEEP * self.bt + size * took

    def fit(self) -> Lane:
        """Return the lane with the fitted speed. Equal periods leave the latency as declared."""
        det = self.cc * self.bb - self.cb * self.cb
        latency = float(self.lane.latency_ns)
        if det > 1e-3 * self.cc * self.bb:
            latency = max(0.0, (self.ct * self.bb - self.bt * self.cb) / det)
        slope = (self.bt - latency * self.cb) / self.bb
        if slope <= 0:
            latency, slope = 0.0, self.bt / self.bb
        return replace(self.lane, bytes_per_s=_NS / slope, latency_ns=int(latency))


@dataclass(slots=True)
class Feedback:
    """Measurements of a manager's lanes and of its leases' layers.

    Args:
        manager: the manager.

    Attributes:
        layers: the last layers waited for, with their predicted and real times.
    """

    manager: BlockManager
    layers: deque[LayerArrival] = field(default_factory=lambda: deque[LayerArrival](maxlen=_LAYERS))
    _lanes: dict[str, _Sums] = field(default_factory=dict[str, _Sums])
    _ways: dict[tuple[int, int, bool], _Sums] = field(
        default_factory=dict[tuple[int, int, bool], _Sums]
    )

    def began(self, job: Job, now: int) -> None:
        """Count the start of a copy on its lane."""
        sums = self._sums(job)
        if not sums.running:
            sums.since, sums.copies, sums.bytes = now, 0, 0
            sums.counted_to = now
        sums.running += 1

    def ended(self, job: Job, now: int, *, brought: int, handed: bool = False) -> None:
        """Count the end of a copy.

        Args:
            job: the copy's job.
            now: the time.
            brought: bytes copied, or 0 if the copy failed.
            handed: the copy was only enqueued on a GPU. `record_copy_time` reports its time later.
        """
        sums = self._sums(job)
        sums.running -= 1
        if sums.running or not handed:
            self._busy(sums, now - sums.counted_to)
        sums.counted_to = now
        if brought:
            sums.copies += 1
            sums.bytes += brought
        if sums.running and sums.copies < _COPIES:
            return
        sums.close(now)

    def record_copy_time(self, job: Job, size: int, ns: int) -> None:
        """Count the bytes and time of sequential copies on a GPU stream."""
        sums = self._sums(job)
        self._busy(sums, ns)
        sums.add(1, size, ns)

    def record_arrival(self, arrival: LayerArrival) -> None:
        """Record the arrival of a layer."""
        self.layers.append(arrival)

    def lanes(self) -> dict[str, Lane]:
        """Return the measured lanes with their fitted speeds."""
        return {name: sums.fit() for name, sums in self._lanes.items() if sums.bb}

    def _busy(self, sums: _Sums, ns: int) -> None:
        with suppress(ClosedError, InvariantError):  # the next report raises them
            self.manager.add_lane_busy(sums.lane.name, busy_ns=max(0, ns))

    def _sums(self, job: Job) -> _Sums:
        way = (*job.tiers, job.store)
        sums = self._ways.get(way)
        if sums is None:
            lane = self.manager.tiers[max(job.tiers)].lanes()[1 if job.store else 0]
            sums = self._ways[way] = self._lanes.setdefault(lane.name, _Sums(lane))
        return sums
