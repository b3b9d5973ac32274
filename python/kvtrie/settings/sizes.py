"""Sizes: bytes in readable notation, and the available bytes.

`8000000000`, `8e9`, `"8GB"` (10^9), `"512MiB"` (2^20) and `"25%"` are sizes. A share is relative to
the free memory or disk at the time of reading. The control group's memory counts if it is less. On
a disk the folder's present contents count as free, so a restart finds the same room.
Invariant: a returned size is a whole number of bytes within its bounds. Cost: a few small files for
a share, and a listing of the folder for a share of a disk.
"""

from __future__ import annotations

import math
import os
import re
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

from kvtrie.errors import ConfigError
from kvtrie.settings.argument import folder as read_folder
from kvtrie.settings.argument import shown, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = [
    "all_disk",
    "all_memory",
    "check_exists",
    "forgotten",
    "free_disk",
    "free_memory",
    "is_share",
    "path_and_size",
    "size",
]

_UNITS = {"B": 1} | {
    f"{prefix}{end}": base**power
    for end, base in (("B", 1000), ("iB", 1024))
    for power, prefix in enumerate("KMGTPE", 1)
}
_NAMES = {name.lower(): factor for name, factor in _UNITS.items()}
_SIZE = re.compile(
    r"([0-9][0-9_]{0,99}(?:\.[0-9]{1,99})?(?:e[+-]?[0-9]{1,2})?)\s*([a-z%]*)", re.IGNORECASE
)
_SMALL = 1_000_000  # smaller numbers probably lack a unit
_ALL = 100  # per cent
_STORE = re.compile(r"[0-9a-f]{16}")
_WANTED = "a whole number of bytes or a size as '8GB' or '512MiB' wanted"


def size(
    name: str,
    given: object,
    low: int = 1,
    high: int = 2**63 - 1,
    *,
    of: Callable[[], int] | None = None,
) -> int:
    """Return the bytes from a number or a text.

    Args:
        name: the setting, for messages.
        given: a whole number, possibly as a float, or a text with a unit.
        low: the smallest allowed size.
        high: the largest allowed size.
        of: returns the bytes a share is relative to. None allows no share.

    Raises:
        ConfigError: no size, a size out of bounds, or a share that is not allowed.
    """
    if isinstance(given, str):
        return whole(name, _read(name, given, of), low, high)
    if isinstance(given, float) and 0 < given < _SMALL and not given.is_integer():
        raise ConfigError(f"{name} is {given}, {_WANTED}{forgotten(given)}")
    return whole(name, given, low, high)


def path_and_size(name: str, given: object) -> tuple[str, str]:
    """Return the two parts of a disk written as `PATH:SIZE`, for example `/kv:200GB`.

    Args:
        name: the setting, for messages.
        given: the text. The size is its part after the last colon, and is not parsed yet.

    Raises:
        ConfigError: a part is missing, or the path is invalid.
    """
    path, _, room = given.rpartition(":") if isinstance(given, str) else ("", "", "")
    if not path or _SIZE.fullmatch(room.strip()) is None:
        raise ConfigError(f"{name} is {shown(given)}, PATH:SIZE wanted, as /kv:200GB")
    return read_folder(f"path of {name}", path), room.strip()


def forgotten(given: float) -> str:
    """Return the end of a message about a number of bytes so small that its unit is missing."""
    return f"; did you mean '{given:g}GB'?" if 0 < given < _SMALL else ""


def is_share(given: object) -> bool:
    """Return whether a size is a share of the free bytes."""
    return isinstance(given, str) and given.strip().endswith("%")


def _read(name: str, given: str, of: Callable[[], int] | None) -> int:
    found = _SIZE.fullmatch(given.strip())
    if found is None or not found[2]:
        hint = "" if found is None else forgotten(float(found[1].replace("_", "")))
        raise ConfigError(f"{name} is {shown(given)}, {_WANTED}, in text with a unit{hint}")
    number, unit = Fraction(found[1].replace("_", "")), found[2]
    if unit == "%":
        if of is None:
            raise ConfigError(
                f"{name} is {shown(given)}, which is a share of nothing here: {_WANTED}"
            )
        if not 0 < number <= _ALL:
            raise ConfigError(f"{name} is {shown(given)}, more than 0% to 100% wanted")
        return math.floor(of() * number / _ALL)
    if unit.lower() not in _NAMES:
        units = ", ".join(_UNITS)
        raise ConfigError(f"{name} is {shown(given)}, {_WANTED}: the units are {units}")
    return math.floor(number * _NAMES[unit.lower()])


def check_exists(name: str, wanted: int, available: int, where: str) -> None:
    """Refuse more bytes than the machine has.

    Args:
        name: the setting, for messages.
        wanted: its bytes.
        available: all bytes, used or free. 0 if unknown.
        where: the memory or disk.

    Raises:
        ConfigError: the machine has fewer.
    """
    if 0 < available < wanted:
        raise ConfigError(f"{name} takes {wanted} bytes, {where} has {available}")


def free_memory(root: Path = Path("/")) -> int:
    """Return the bytes of free or reclaimable memory.

    The smaller number counts: of the machine, or of the process's control group.

    Raises:
        ConfigError: the system does not report it.
    """
    free = _memory(root, "MemAvailable")
    limits = (limit - used for limit, used in _limits(root))
    return max(0, min((free, *limits)))


def all_memory(root: Path = Path("/")) -> int:
    """Return the bytes of memory, used or free: of the machine, or the control group's limit.

    0 if the system does not report it.
    """
    try:
        total = _memory(root, "MemTotal")
    except ConfigError:
        return 0
    return min((total, *(limit for limit, _ in _limits(root))))


def free_disk(folder: str | Path) -> int:
    """Return the bytes for the stores of a folder: the free bytes and their present bytes.

    Raises:
        ConfigError: the folder is not accessible.
    """
    found = _file_system(folder)
    return found.f_bavail * found.f_frsize + sum(_taken(folder))


def all_disk(folder: str | Path) -> int:
    """Return the bytes of the file system of a folder, used or free, or 0 if unknown.

    Raises:
        ConfigError: the folder is not accessible.
    """
    found = _file_system(folder)
    return found.f_blocks * found.f_frsize


def _file_system(folder: str | Path) -> os.statvfs_result:
    """Return the file system of a folder, or of its nearest existing parent."""
    try:
        existing = Path(folder).absolute()
        while not existing.exists() and existing != existing.parent:
            existing = existing.parent
        return os.statvfs(existing)
    except OSError as error:
        raise ConfigError(f"the folder {folder} cannot be looked at: {error.strerror}") from error


def _taken(folder: str | Path) -> Iterator[int]:
    """Yield the bytes of each file of the stores in a folder."""
    # The folder and its files may disappear: a process using it removes files.
    with suppress(OSError):
        for store in Path(folder).iterdir():
            if _STORE.fullmatch(store.name):
                with suppress(OSError):
                    yield from (512 * file.lstat().st_blocks for file in store.iterdir())


def _memory(root: Path, row: str) -> int:
    try:
        with (root / "proc/meminfo").open(encoding="ascii") as file:
            for line in file:
                if line.startswith(f"{row}:"):
                    return int(line.split()[1]) << 10
    except OSError:
        pass
    raise ConfigError("this system does not report its free memory: give sizes in bytes")


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield limit and use of each control group with a memory limit for this process."""
    try:
        rows = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    groups = root / "sys/fs/cgroup"
    for row in rows:
        _, kinds, path = row.split(":", 2)
        if not kinds:
            files = ("memory.max", "memory.current", "inactive_file")
            top = groups
        elif "memory" in kinds.split(","):
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            top = groups / "memory"
        else:
            continue
        group_path = top / path.lstrip("/")
        # A container may see its own group as the root, whatever the path is.
        for group in {group_path, *group_path.parents, top}:
            if group == top or top in group.parents:
                yield from _limit(group, *files)


def _limit(group: Path, most: str, current: str, cache: str) -> Iterator[tuple[int, int]]:
    try:
        limit = (group / most).read_text(encoding="ascii").strip()
        if not limit.isdecimal():  # "max"
            return
        used = int((group / current).read_text(encoding="ascii"))
        rows = (group / "memory.stat").read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return
    pairs = (row.split() for row in rows)
    # The page cache can be reclaimed.
    files = next((int(value) for name, value in pairs if name == cache), 0)
    yield int(limit), max(0, used - files)
