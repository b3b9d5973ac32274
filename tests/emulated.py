"""Debian's CPython for another processor, under qemu-user.

Invariant: apt's state is private and packages are unpacked, not installed: the machine's packages,
architectures and sources stay as they are. Cost: 45 MB of downloads and half a minute, once per
folder.
"""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["emulated_python"]

DEBIAN = {"aarch64": "arm64", "x86_64": "amd64"}
PACKAGES = ("python3", "libstdc++6")  # numpy's wheels need the second


def emulated_python(machine: str, folder: Path) -> list[str]:
    """Return the words that start CPython for a processor.

    Args:
        machine: "aarch64" or "x86_64".
        folder: where packages are unpacked, in a folder per processor.

    Raises:
        LookupError: what is not installed here, or the packages that this machine's sources lack.
    """
    emulators = (shutil.which(f"qemu-{machine}{suffix}") for suffix in ("", "-static"))
    emulator = next(filter(None, emulators), None)
    if emulator is None:
        raise LookupError(f"there is no qemu-{machine}; Debian's package qemu-user has it")
    if shutil.which("apt-get") is None:
        raise LookupError(f"there is no apt-get to fetch Python for {machine}")
    root = folder / machine
    if not (root / ".ready").exists():
        shutil.rmtree(root, ignore_errors=True)
        unpack(DEBIAN[machine], root)
        (root / ".ready").touch()
    return [emulator, "-L", str(root), str(root / "usr/bin/python3")]


def unpack(architecture: str, root: Path) -> None:
    """Unpack Python and all that it depends on from the package sources of this machine."""
    state = root / "apt"
    for name in ("lists/partial", "archives/partial"):
        (state / name).mkdir(parents=True)
    (state / "status").touch()  # nothing is installed there, so apt fetches every dependency
    settings = {
        "APT::Architecture": architecture,
        "APT::Architectures": architecture,
        "APT::Install-Recommends": 0,
        "APT::Sandbox::User": "",
        "Acquire::Languages": "none",
        "Debug::NoLocking": 1,
        "Dir::Cache": state,
        "Dir::State": state,
        "Dir::State::status": state / "status",
    }
    apt = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in settings.items())]
    for words in (["update"], ["install", "--yes", "--download-only", *PACKAGES]):
        done = subprocess.run([*apt, *words], capture_output=True, text=True, check=False)
        if done.returncode:
            raise LookupError(f"no {architecture} packages of Python here: {done.stderr.strip()}")
    for name in ("bin", "lib", "sbin"):  # the links of a Debian whose /usr is merged
        (root / "usr" / name).mkdir(parents=True)
        (root / name).symlink_to(f"usr/{name}")
    for package in sorted((state / "archives").glob("*.deb")):
        subprocess.run(["dpkg-deb", "--extract", package, root], check=True)  # noqa: S607
    shutil.rmtree(state)
