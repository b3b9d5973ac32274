"""`kvtrie doctor`: whether a machine and its packages can run a server with kvtrie.

Each check is one line: `ok`, `warning` or `error`, and for the last two the command that fixes it.
Invariant: nothing is changed; a file that tests direct writes is removed, and so are the blocks
that test a shared store. Cost: milliseconds; no engine is imported.
"""

from __future__ import annotations

import json
import platform
import re
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from kvtrie.errors import ConfigError, KvtrieError
from kvtrie.settings.argument import folder as read_folder
from kvtrie.settings.machine import (
    IN_MEMORY,
    ON_NETWORK,
    direct_io,
    file_system,
    io_uring,
    locked_limit,
    nvidia_driver,
)
from kvtrie.settings.sizes import all_disk, all_memory, free_disk, free_memory

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

__all__ = ["COMMAND", "ENGINES", "Check", "checks"]

_OLDEST_PYTHON = (3, 11)
_OLDEST_TORCH = (2, 10)
_SHARE = 4  # a quarter of free memory is the default host tier
_LEAST_SHM = 1 << 30
_LEAST_DISK = 10**9
_GB = 10**9
_FAILED = 1
_ABSENT = "not installed"

ENGINES = {
    "vllm": ((0, 30), (0, 32), (0, 33), "0.32.*"),
    "sglang": ((0, 5, 23), (0, 5, 23), (0, 5, 23), "0.5.23"),
}
"""Of each engine: the oldest supported version, the tested one, the newest checked one, pip's."""


@dataclass(frozen=True, slots=True)
class Check:
    """A result of one check.

    Attributes:
        state: "ok", "warning" or "error".
        name: the property.
        found: its value here.
        fix: the command that changes it; "" if nothing has to.
    """

    state: Literal["ok", "warning", "error"]
    name: str
    found: str
    fix: str = ""


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--disk", metavar="PATH", help="check the folder of a disk tier too")
    parser.add_argument("--remote", metavar="URL", help="write to and read from a shared store too")
    parser.add_argument("--control", metavar="SOCKET", help="failed writes of a running server too")
    parser.add_argument("--engine", choices=tuple(ENGINES), help="an engine that has to be there")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=_run)


def _run(given: argparse.Namespace) -> int:
    disk = None if given.disk is None else Path(read_folder("--disk", given.disk))
    found = list(checks(given.engine, disk))
    if given.remote is not None:
        found += _remote(given.remote)
    if given.control is not None:
        found += _server(given.control)
    if given.json:
        sys.stdout.write(json.dumps([asdict(check) for check in found]) + "\n")
    else:
        width = max(len(check.name) for check in found)
        for check in found:
            fix = f"; fix: {check.fix}" if check.fix else ""
            sys.stdout.write(f"{check.state:8} {check.name:{width}}  {check.found}{fix}\n")
    return _FAILED if any(check.state == "error" for check in found) else 0


def checks(engine: str | None = None, disk: Path | None = None) -> Iterator[Check]:
    """Yield the checks of this machine.

    Args:
        engine: the engine that has to be installed; None takes those that are.
        disk: the folder of a disk tier.
    """
    yield _python()
    yield _torch()
    for name in ENGINES if engine is None else (engine,):
        check = _engine(name, wanted=engine is not None)
        if check is not None:
            yield check
    yield _driver()
    yield _memory()
    yield _locked()
    yield _shared()
    if disk is not None:
        yield from _disk(disk)


def _python() -> Check:
    if sys.version_info < _OLDEST_PYTHON:
        return Check("error", "Python", platform.python_version(), "uv venv --python 3.12")
    return Check("ok", "Python", platform.python_version())


def _torch() -> Check:
    found = _version("torch")
    if found is None:
        return Check("warning", "torch", _ABSENT, "pip install 'kvtrie[hf]'")
    if _numbers(found) < _OLDEST_TORCH:
        return Check("warning", "torch", f"{found}, 2.10 wanted", "pip install 'torch>=2.10'")
    return Check("ok", "torch", found)


def _engine(name: str, *, wanted: bool) -> Check | None:
    """The version of an engine: tested, newer or unsupported; None for one that is not wanted."""
    oldest, tested, newest, pinned = ENGINES[name]
    text, fix = ".".join(map(str, tested)), f"pip install '{name}=={pinned}'"
    found = _version(name)
    if found is None:
        return Check("error", name, _ABSENT, fix) if wanted else None
    numbers = _numbers(found)[: len(tested)]
    if oldest <= numbers <= tested:
        return Check("ok", name, f"{found}, {'tested' if numbers == tested else 'supported'}")
    if numbers < oldest:
        first = ".".join(map(str, oldest))
        return Check("error", name, f"{found}, unsupported: older than {first}", fix)
    if numbers <= newest:
        return Check("warning", name, f"{found}, newer than the tested {text}", fix)
    return Check("warning", name, f"{found}, newer than all versions that were checked", fix)


def _driver() -> Check:
    found = nvidia_driver()
    return Check("ok", "NVIDIA driver", found or "none, so kvtrie uses the CPU")


def _memory() -> Check:
    try:
        free, there = free_memory(), all_memory()
    except ConfigError as error:
        return Check("warning", "free memory", str(error), "give --host in bytes")
    text = f"{_gb(free)} of {_gb(there)} that the machine or its control group has"
    text += f"; the default host tier is {_gb(free // _SHARE)}"
    if free < _GB:
        fix = "docker run --memory, systemd MemoryMax= or end other programs"
        return Check("error", "free memory", text, fix)
    return Check("ok", "free memory", text)


def _locked() -> Check:
    limit = locked_limit()
    if limit is None:
        return Check("ok", "locked memory", "no limit")
    text = f"limit {limit / (1 << 20):.0f} MiB"
    if not nvidia_driver():
        return Check("ok", "locked memory", f"{text}; only a GPU needs more")
    if limit < all_memory() // _SHARE:
        fix = "ulimit -l unlimited (docker run --ulimit memlock=-1, systemd LimitMEMLOCK=infinity)"
        return Check("warning", "locked memory", f"{text}, below a quarter of the memory", fix)
    return Check("ok", "locked memory", text)


def _shared() -> Check:
    folder = "/dev/shm"  # noqa: S108 - the kernel's name of shared memory
    try:
        size = all_disk(folder)
    except ConfigError as error:
        return Check("error", "shared memory", str(error), f"mount -t tmpfs tmpfs {folder}")
    if size < _LEAST_SHM:
        fix = "docker run --shm-size=8g (or --ipc=host)"
        return Check("warning", "shared memory", f"{folder}: {size >> 20} MiB, 1 GiB wanted", fix)
    return Check("ok", "shared memory", f"{folder}: {_gb(size)}")


def _disk(disk: Path) -> Iterator[Check]:
    """The folder of a disk tier: its file system, room, direct writes and the kernel's queue."""
    kind = file_system(disk) or "unknown"
    if kind in IN_MEMORY:
        yield Check("warning", "disk", f"{disk} is on {kind}, which is memory", "use a local disk")
    elif kind in ON_NETWORK:
        yield Check("warning", "disk", f"{disk} is on {kind}, a network", "use a local disk")
    else:
        yield Check("ok", "disk", f"{disk} is on {kind}")
    yield _guarded("disk space", lambda: _space(disk))
    yield _guarded("O_DIRECT", lambda: _direct(disk))
    refused = io_uring()
    if refused:
        fix = "sysctl kernel.io_uring_disabled=0 (docker run --security-opt seccomp=unconfined)"
        yield Check("warning", "io_uring", f"{refused}: threads are used, which are slower", fix)
    else:
        yield Check("ok", "io_uring", "available")


def _remote(url: str) -> list[Check]:
    """The operations of a shared store, each once."""
    from kvtrie.tiers.remote.check import check_store
    from kvtrie.tiers.remote.url import RemoteUrl

    parsed = RemoteUrl.parse("--remote", url)
    try:
        report = check_store(parsed, sizes=())
    except KvtrieError as error:
        return [Check("error", "remote", f"{parsed}: {error}", "make the store reachable")]
    failed = [step for step in report.steps if not step.ok]
    if not failed:
        return [Check("ok", "remote", f"{parsed} writes and reads")]
    fix = f"kvtrie remote check {parsed}"
    return [Check("error", "remote", f"{parsed}: {one.name}: {one.detail}", fix) for one in failed]


def _server(socket: str) -> list[Check]:
    """Writes into the tiers of a running server that failed."""
    from kvtrie.cli.control import ask

    tiers = ask(socket, "/stats")["manager"]["tiers"]
    found: list[Check] = []
    for name, tier in tiers.items():
        failed, moves = tier["failed"], tier["moves"]
        if failed:
            text = f"{failed} of {moves} moves into it failed"
            fix = "the reason is in the server's log, once a day: grep kvtrie"
            found.append(
                Check("error" if failed >= moves else "warning", f"tier {name}", text, fix)
            )
    return found or [Check("ok", "server", "no move into a tier has failed")]


def _space(disk: Path) -> Check:
    free = free_disk(disk)
    if free < _LEAST_DISK:
        return Check("error", "disk space", f"{_gb(free)} free", "give --disk another folder")
    return Check("ok", "disk space", f"{_gb(free)} free or taken by kvtrie")


def _direct(disk: Path) -> Check:
    there = disk.absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    refused = direct_io(there)
    if refused:
        return Check("warning", "O_DIRECT", f"{refused}: writes use the page cache", "use ext4/xfs")
    return Check("ok", "O_DIRECT", "available")


def _guarded(name: str, check: Callable[[], Check]) -> Check:
    """A check of a folder that may not be readable or writable."""
    try:
        return check()
    except (ConfigError, OSError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        return Check("error", name, str(why), "chown or chmod the folder, or choose another one")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _numbers(text: str) -> tuple[int, ...]:
    """The numbers of a version before its first letter."""
    return tuple(map(int, re.findall(r"\d+", re.split(r"[^\d.]", text, maxsplit=1)[0])))


def _gb(size: int) -> str:
    return f"{size / _GB:.1f} GB"


COMMAND = ("check that this machine can run a server with kvtrie", _arguments)
