"""A view: the figures of `kvtrie top` for the time between two scrapes.

Rates are per second of the manager's own clock, so a replay shows the trace's time.
Invariant: a view follows from its two scrapes alone. Cost: a few passes over their samples.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtrie.cli.scrape import Scrape, quantile

__all__ = ["MachineView", "TierView", "View"]


@dataclass(frozen=True, slots=True)
class TierView:
    """A tier.

    Attributes:
        machine: number of its machine.
        tier: its kind.
        policy: the eviction policy.
        slots: all slots.
        used: share of its slots not writable at once.
        clean: share of its copies droppable without a loss.
        hits: share of the requested blocks found here since the previous view.
        hits_ever: the same since the manager was made.
        evictions: per second.
        age: of the median copy at eviction, in seconds. None without evictions.
        loads: latencies of loads from here, median and 99th percentile in seconds, or None.
        stores: the same for stores to here.
        read: bytes per second.
        written: bytes per second.
        groups: held and released slots of each group of layers, in the model's order, if groups of
            layers are kept apart.
    """

    machine: str
    tier: str
    policy: str
    slots: int
    used: float
    clean: float
    hits: float
    hits_ever: float
    evictions: float
    age: float | None
    loads: tuple[float, float] | None
    stores: tuple[float, float] | None
    read: float
    written: float
    groups: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class MachineView:
    """A manager.

    Attributes:
        machine: its number.
        up: whether it serves.
        time: its clock, in seconds.
        requests: per second.
        hits: share of the requested blocks found on any tier.
        hits_ever: the same since it was made.
        blocks: known blocks.
        leases: held now.
        moves: unfinished moves.
    """

    machine: str
    up: bool
    time: float
    requests: float
    hits: float
    hits_ever: float
    blocks: int
    leases: int
    moves: int


@dataclass(frozen=True, slots=True)
class View:
    """All managers and their tiers."""

    machines: tuple[MachineView, ...]
    tiers: tuple[TierView, ...]

    @classmethod
    def between(cls, before: Scrape, after: Scrape) -> View:
        """Return the view of the time between two scrapes. The first scrape may be empty."""
        machines = [labels["machine"] for labels, _ in after.samples.get("kvtrie_up", ())]
        spans = {machine: _Interval(before, after, machine) for machine in machines}
        return cls(
            tuple(span.machine_view() for span in spans.values()),
            tuple(spans[labels["machine"]].tier_view(labels) for labels in after.tiers()),
        )


class _Interval:
    """The time between two scrapes of a manager."""

    def __init__(self, before: Scrape, after: Scrape, machine: str) -> None:
        self._before, self._after = before, after
        self._labels = {"machine": machine}
        self._seconds = self._more("kvtrie_time_seconds", self._labels)

    def _more(self, name: str, labels: dict[str, str]) -> float:
        return self._after.value(name, labels) - self._before.value(name, labels)

    def _rate(self, name: str, labels: dict[str, str]) -> float:
        return self._more(name, labels) / self._seconds if self._seconds > 0 else 0.0

    def _hits(self, labels: dict[str, str]) -> tuple[float, float]:
        """Return the found shares of requested blocks: since the previous scrape, and ever."""
        found, requested = "kvtrie_hit_blocks_total", "kvtrie_requested_blocks_total"
        return (
            _share(self._more(found, labels), self._more(requested, self._labels)),
            _share(self._after.value(found, labels), self._after.value(requested, self._labels)),
        )

    def _quantile(self, share: float, name: str, labels: dict[str, str]) -> float | None:
        after, before = self._after.buckets(name, labels), self._before.buckets(name, labels)
        return quantile(share, after, before)

    def _latency(self, labels: dict[str, str], kind: str) -> tuple[float, float] | None:
        name, labels = "kvtrie_move_seconds", {**labels, "kind": kind}
        median, late = self._quantile(0.5, name, labels), self._quantile(0.99, name, labels)
        return None if median is None or late is None else (median, late)

    def machine_view(self) -> MachineView:
        labels = self._labels
        hits, ever = self._hits(labels)
        now = self._after.value
        return MachineView(
            machine=labels["machine"],
            up=now("kvtrie_up", labels) > 0,
            time=now("kvtrie_time_seconds", labels),
            requests=self._rate("kvtrie_requests_total", labels),
            hits=hits,
            hits_ever=ever,
            blocks=int(now("kvtrie_known_blocks", labels)),
            leases=int(now("kvtrie_leases", labels)),
            moves=int(now("kvtrie_pending_moves", labels)),
        )

    def tier_view(self, labels: dict[str, str]) -> TierView:
        hits, ever = self._hits(labels)
        now = self._after.value
        slots = now("kvtrie_slots", labels)
        return TierView(
            **labels,
            slots=int(slots),
            used=1 - _share(now("kvtrie_free_slots", labels), slots),
            clean=_share(now("kvtrie_clean_copies", labels), now("kvtrie_copies", labels)),
            hits=hits,
            hits_ever=ever,
            evictions=self._rate("kvtrie_evictions_total", labels),
            age=self._quantile(0.5, "kvtrie_eviction_age_seconds", labels),
            loads=self._latency(labels, "load"),
            stores=self._latency(labels, "store"),
            read=self._rate("kvtrie_read_bytes_total", labels),
            written=self._rate("kvtrie_written_bytes_total", labels),
            groups=self._groups(labels),
        )

    def _groups(self, labels: dict[str, str]) -> tuple[tuple[int, int], ...]:
        """Return held and released slots of each group of layers."""
        held = self._after.samples.get("kvtrie_group_held_slots", ())
        numbers = [int(of["group"]) for of, _ in held if labels.items() <= of.items()]
        now = self._after.value
        return tuple(
            (
                int(now("kvtrie_group_held_slots", one)),
                int(now("kvtrie_group_released_slots", one)),
            )
            for one in ({**labels, "group": str(number)} for number in sorted(numbers))
        )


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
