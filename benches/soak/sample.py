"""Sample: counters of an engine and its process at one moment.

Invariant: a sample is taken while no request is under way, so that what differs has stayed.
Cost: one collection of garbage.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benches.measure import resident_bytes

if TYPE_CHECKING:
    from benches.soak.engine import Engine

DESCRIPTORS = Path("/proc/self/fd")


@dataclass(frozen=True)
class Sample:
    """Counts since the start, and what the process holds now.

    Attributes:
        at_s: seconds, of a clock without a date.
        requests: requests that have ended.
        read: blocks that were found and compared.
        checked: bytes that were compared.
        wrong: blocks with other bytes than they must have.
        failed: moves into each tier that failed.
        planned: reads that were made to fail.
        hits: blocks found, per tier.
        evicted: evictions, per tier.
        wanted: blocks that were asked for.
        disk_read: bytes read from disk.
        disk_written: bytes written to it.
        resident: bytes of memory.
        descriptors: open files of the process, rings aside.
        rings: queues of io_uring. The disk tier makes another one when more of its calls run at
            once than ever before, and keeps it: that may take longer than any warm-up.
    """

    at_s: float
    requests: int
    read: int
    checked: int
    wrong: int
    failed: dict[str, int]
    planned: int
    hits: dict[str, int]
    evicted: dict[str, int]
    wanted: int
    disk_read: int
    disk_written: int
    resident: int
    descriptors: int
    rings: int

    @classmethod
    def of(cls, engine: Engine, at_s: float) -> Sample:
        """Sample an engine now, which is `at_s`."""
        stats = engine.manager.stats()
        resident = resident_bytes()
        files = open_files()
        rings = sum("io_uring" in name for name in files)
        return cls(
            at_s=at_s,
            requests=engine.requests,
            read=engine.read,
            checked=engine.checked,
            wrong=engine.wrong,
            failed={name: tier.failed for name, tier in stats.tiers.items()},
            planned=engine.disk.planned,
            hits={name: tier.hits for name, tier in stats.tiers.items()},
            evicted={name: tier.evicted for name, tier in stats.tiers.items()},
            wanted=stats.blocks_wanted,
            disk_read=stats.tiers["disk"].bytes_read,
            disk_written=stats.tiers["disk"].bytes_written,
            resident=resident,
            descriptors=len(files) - rings,
            rings=rings,
        )

    def grown(self, before: Sample) -> float:
        """Bytes of memory per request since an earlier sample."""
        return (self.resident - before.resident) / max(1, self.requests - before.requests)

    def line(self, before: Sample) -> str:
        """Changes since an earlier sample, in one line."""
        seconds = self.at_s - before.at_s
        hits = sum(self.hits.values()) - sum(before.hits.values())
        found = hits / max(1, self.wanted - before.wanted)
        checked, disk_read, disk_written = (
            (getattr(self, name) - getattr(before, name)) / seconds / 1e6
            for name in ("checked", "disk_read", "disk_written")
        )
        return (
            f"{(self.requests - before.requests) / seconds:.0f} requests/s, {checked:.0f} MB/s "
            f"compared, disk {disk_read:.0f} MB/s read and {disk_written:.0f} written, "
            f"{found:.0%} found, {self.planned} reads failed as planned, "
            f"{self.resident / 1e6:.1f} MB resident, {self.grown(before):+.0f} B a request, "
            f"{self.descriptors} descriptors"
        )


def open_files() -> list[str]:
    """The target of each of the process's descriptors."""
    names: list[str] = []
    for link in DESCRIPTORS.iterdir():
        with suppress(FileNotFoundError):  # the one that listed them is closed
            names.append(str(link.readlink()))
    return names
