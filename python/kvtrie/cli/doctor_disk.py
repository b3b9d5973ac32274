"""Checks of the folder of a disk tier: its file system, room, direct writes, the kernel's queue.

Invariant: the test file for direct writes is removed. Cost: a listing of the folder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtrie.cli.doctor_check import Check, gb
from kvtrie.errors import ConfigError
from kvtrie.settings.machine import (
    IN_MEMORY,
    ON_NETWORK,
    OVERLAYS,
    direct_io,
    file_system,
    io_uring,
)
from kvtrie.settings.sizes import free_disk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

__all__ = ["disk_checks"]

_LEAST_DISK = 10**9


def disk_checks(disk: Path, wanted: int | None = None) -> Iterator[Check]:
    """Yield the checks of a folder.

    Args:
        disk: the folder. It need not exist.
        wanted: bytes of the disk tier, or None if unknown.
    """
    yield _kind(disk)
    yield _guarded("disk space", lambda: _space(disk, wanted))
    yield _guarded("O_DIRECT", lambda: _direct(disk))
    refused = io_uring()
    if refused:
        fix = "sysctl kernel.io_uring_disabled=0 (docker run --security-opt seccomp=unconfined)"
        yield Check("warning", "io_uring", f"{refused}: threads are used, which are slower", fix)
    else:
        yield Check("ok", "io_uring", "available")


def _kind(disk: Path) -> Check:
    kind = file_system(disk) or "unknown"
    where = f"{disk} is on {kind}"
    if kind in IN_MEMORY:
        return Check("warning", "disk", f"{where}, which is memory", "use a local disk")
    if kind in OVERLAYS:
        fix = "mount a volume (docker run -v, volumeMounts)"
        return Check("warning", "disk", f"{where}, which is removed with its container", fix)
    if kind in ON_NETWORK:
        return Check("warning", "disk", f"{where}, a network", "use a local disk")
    if kind.startswith("fuse."):
        return Check("warning", "disk", f"{where}, which a program serves", "use a local disk")
    return Check("ok", "disk", where)


def _space(disk: Path, wanted: int | None) -> Check:
    free = free_disk(disk)
    text = f"{gb(free)} free or taken by kvtrie"
    if wanted is not None and free < wanted:
        fix = "a larger volume, or a smaller disk tier"
        return Check("error", "disk space", f"{text}, the disk tier takes {gb(wanted)}", fix)
    if free < _LEAST_DISK:
        return Check("error", "disk space", f"{gb(free)} free", "give --disk another folder")
    return Check("ok", "disk space", text)


def _direct(disk: Path) -> Check:
    existing = disk.absolute()
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    refused = direct_io(existing)
    if refused:
        return Check("warning", "O_DIRECT", f"{refused}: writes use the page cache", "use ext4/xfs")
    return Check("ok", "O_DIRECT", "available")


def _guarded(name: str, check: Callable[[], Check]) -> Check:
    """Run a check of a folder, and report an unreadable or unwritable folder."""
    try:
        return check()
    except (ConfigError, OSError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        return Check("error", name, str(why), "chown or chmod the folder, or choose another one")
