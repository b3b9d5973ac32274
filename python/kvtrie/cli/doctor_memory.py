"""Checks of memory against the host tier of a server: limits of containers, `/dev/shm`, `keep`.

A host tier takes at most 1.1 times its bytes, and the processes of a server need memory as well:
`MARGIN` bytes here. The memory of a file in `/dev/shm` also counts for the limit.
Cost: a few small files.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvtrie.cli.doctor_check import Check, gb
from kvtrie.errors import ConfigError
from kvtrie.settings.machine import IN_MEMORY, file_system, locked_limit, nvidia_driver
from kvtrie.settings.sizes import all_disk, all_memory, free_memory

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvtrie.settings.tier import Tier

__all__ = ["MARGIN", "memory_checks", "taken_at_most"]

MARGIN = 4 * 10**9
"""Bytes of memory for the processes of a server, in addition to the host tier."""

_SHARE = 4  # a quarter of free memory is the default host tier
_LEAST_FREE = 10**9
_LEAST_SHM = 1 << 30
_SHM = "/dev/shm"  # noqa: S108 - the kernel's name of shared memory


def taken_at_most(size: int) -> int:
    """Return the maximum bytes taken by a host tier of `size` bytes: 1.1 times the size."""
    return size * 11 // 10


def memory_checks(host: Tier | None = None) -> Iterator[Check]:
    """Yield the checks of memory.

    Args:
        host: the host tier of a server, or None if unknown.
    """
    size = None if host is None or host.bytes is None else int(host.bytes)
    yield _free()
    if size is not None:
        yield _limit(size)
    yield _locked(size)
    yield _shared()
    if host is not None and host.keep is not None:
        yield _kept(host.keep, size)


def _free() -> Check:
    try:
        free, total = free_memory(), all_memory()
    except ConfigError as error:
        return Check("warning", "free memory", str(error), "give --host in bytes")
    text = f"{gb(free)} of {gb(total)} that the machine or its control group has"
    text += f"; the default host tier is {gb(free // _SHARE)}"
    if free < _LEAST_FREE:
        fix = "docker run --memory, systemd MemoryMax= or end other programs"
        return Check("error", "free memory", text, fix)
    return Check("ok", "free memory", text)


def _limit(size: int) -> Check:
    total, least = all_memory(), taken_at_most(size)
    text = f"{gb(size)} of {gb(total)} that the machine or its control group has"
    fix = (
        f"a smaller host tier, or a limit of {gb(least + MARGIN)} "
        "(docker run --memory, resources.limits.memory)"
    )
    if 0 < total < least:
        return Check("error", "host tier", f"{text}; it takes up to {gb(least)}", fix)
    if 0 < total < least + MARGIN:
        rest = f"{text}, which leaves {gb(total - least)} to the server's processes"
        return Check("warning", "host tier", rest, fix)
    return Check("ok", "host tier", text)


def _locked(size: int | None) -> Check:
    limit = locked_limit()
    if limit is None:
        return Check("ok", "locked memory", "no limit")
    text = f"limit {limit / (1 << 20):.0f} MiB"
    if not nvidia_driver():
        return Check("ok", "locked memory", f"{text}; only a GPU needs more")
    wanted, what = all_memory() // _SHARE, "a quarter of the memory"
    if size is not None:
        wanted, what = taken_at_most(size), f"the {gb(taken_at_most(size))} of the host tier"
    if limit < wanted:
        fix = "ulimit -l unlimited (docker run --ulimit memlock=-1, systemd LimitMEMLOCK=infinity)"
        return Check("warning", "locked memory", f"{text}, below {what}", fix)
    return Check("ok", "locked memory", text)


def _shared() -> Check:
    try:
        size = all_disk(_SHM)
    except ConfigError as error:
        return Check("error", "shared memory", str(error), f"mount -t tmpfs tmpfs {_SHM}")
    if size < _LEAST_SHM:
        fix = "docker run --shm-size=8g (or --ipc=host)"
        return Check("warning", "shared memory", f"{_SHM}: {size >> 20} MiB, 1 GiB wanted", fix)
    return Check("ok", "shared memory", f"{_SHM}: {gb(size)}")


def _kept(keep: str, size: int | None) -> Check:
    """Check the file system of the host memory's file."""
    folder = Path(keep).parent
    kind = file_system(folder) or "unknown"
    if kind not in (*IN_MEMORY, "hugetlbfs"):
        text = f"{keep} is on {kind}, which is no memory"
        return Check("error", "keep", text, f"keep={_SHM}/NAME")
    try:
        total = all_disk(folder)
    except ConfigError as error:
        return Check("error", "keep", str(error), f"keep={_SHM}/NAME")
    text, least = f"{keep} is on {kind} of {gb(total)}", taken_at_most(size or 0)
    if 0 < total < least:
        fix = "docker run --shm-size, or an emptyDir with medium: Memory and a larger sizeLimit"
        return Check("error", "keep", f"{text}, the host tier takes up to {gb(least)}", fix)
    return Check("ok", "keep", text)
