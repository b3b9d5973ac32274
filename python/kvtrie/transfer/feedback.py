"""Feedback: measured times of lanes and layers, with the predicted ones.

A lane's speed is learned from its busy periods: the time in which at least one copy ran on it, the
bytes copied, and the number of copies. `time = copies × latency + bytes / bandwidth` is fitted by
least squares over the last periods; the weight of a period decays with its age.
The manager also gets the measured busy time of each lane, independent of its declared speed.
Invariant: failed copies and periods below a minimum of bytes do not change the fit.
Cost: a few additions per copy; a fit of two unknowns per busy period.
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

__all__ = ["Feedback", "Sight"]

_NS = 1_000_000_000
_KEEP = 0.9  # of what earlier periods count, with each new one
_COPIES = 16  # copies after which a period ends though the lane is still busy
_BYTES = 1 << 20  # a smaller period measures the threads' overhead rather than the lane
_LAYERS = 4096


class Sight(NamedTuple):
    """When a layer of a lease was there.

    Attributes:
        lease: the lease's id.
        layer: the layer.
        predicted_ns: when its plan said it would be.
        seen_ns: when it was.
    """

    lease: int
    layer: int
    predicted_ns: int
    seen_ns: int


@dataclass(slots=True)
class _Sums:
    """Weighted sums over a lane's busy periods, and the period that runs.

    `counted_to` is the time up to which the manager has counted the lane's busy time.
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
        """End a busy period and add it."""
        copies, size, took = self.copies, self.bytes, now - self.since
        self.copies, self.bytes, self.since = 0, 0, now
        self.add(copies, size, took)

    def add(self, copies: int, size: int, took: int) -> None:
        """Add one period: copies, bytes and nanoseconds; too few bytes are left out."""
        if took <= 0 or size < _BYTES:
            return
        self.cc = _KEEP * self.cc + copies * copies
        self.cb = _KEEP * self.cb + copies * size
        self.bb = _KEEP * self.bb + size * size
        self.ct = _KEEP * self.ct + copies * took
        self.bt = _KEEP * self.bt + size * took

    def fit(self) -> Lane:
        """Return the lane with the fitted speed; with equal periods the latency stays declared."""
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
        layers: the last layers that were waited for, with their predicted and their real times.
    """

    manager: BlockManager
    layers: deque[Sight] = field(default_factory=lambda: deque[Sight](maxlen=_LAYERS))
    _lanes: dict[str, _Sums] = field(default_factory=dict[str, _Sums])
    _ways: dict[tuple[int, int, bool], _Sums] = field(
        default_factory=dict[tuple[int, int, bool], _Sums]
    )

    def began(self, job: Job, now: int) -> None:
        """A copy starts on its lane."""
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
            brought: bytes copied; 0 if the copy failed.
            handed: the copy was only handed to a GPU; `took` reports its time later.
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

    def took(self, job: Job, size: int, ns: int) -> None:
        """Count bytes that a GPU stream copied, one copy after another, and the time they took."""
        sums = self._sums(job)
        self._busy(sums, ns)
        sums.add(1, size, ns)

    def saw(self, sight: Sight) -> None:
        """A layer is there."""
        self.layers.append(sight)

    def lanes(self) -> dict[str, Lane]:
        """Return the lanes that were measured, with their fitted speeds."""
        return {name: sums.fit() for name, sums in self._lanes.items() if sums.bb}

    def _busy(self, sums: _Sums, ns: int) -> None:
        with suppress(ClosedError, InvariantError):  # the report that follows says so
            self.manager.saw_lane(sums.lane.name, busy_ns=max(0, ns))

    def _sums(self, job: Job) -> _Sums:
        way = (*job.tiers, job.store)
        sums = self._ways.get(way)
        if sums is None:
            lane = self.manager.tiers[max(job.tiers)].lanes()[1 if job.store else 0]
            sums = self._ways[way] = self._lanes.setdefault(lane.name, _Sums(lane))
        return sums
