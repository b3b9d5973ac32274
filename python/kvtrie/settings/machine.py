"""The machine: file systems, limits and kernel features relevant to tiers.

Invariant: a function without a result returns None or "", and never raises if the system does not
report a value. Cost: a small file each. `direct_io` writes and removes a file.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
import secrets
from pathlib import Path

__all__ = [
    "IN_MEMORY",
    "ON_NETWORK",
    "OVERLAYS",
    "clock_source",
    "cpu_features",
    "direct_io",
    "file_system",
    "io_uring",
    "locked_limit",
    "nvidia_driver",
]

IN_MEMORY = ("tmpfs", "ramfs")
"""Types of file systems with their files in memory."""
ON_NETWORK = (
    "9p",
    "afs",
    "beegfs",
    "ceph",
    "cifs",
    "gfs2",
    "glusterfs",
    "gpfs",
    "lustre",
    "nfs",
    "nfs4",
    "ocfs2",
    "orangefs",
    "smb3",
    "smbfs",
    "wekafs",
    *(f"fuse.{name}" for name in ("ceph", "gcsfuse", "glusterfs", "juicefs", "mount-s3")),
    *(f"fuse.{name}" for name in ("mountpoint-s3", "rclone", "s3fs", "seaweedfs", "sshfs")),
)
"""Types of file systems with their files on another machine."""
OVERLAYS = ("aufs", "overlay", "fuse.fuse-overlayfs")
"""Types of file systems with files that are removed together with their container."""

_SETUP = 425  # the number of the call io_uring_setup, on every architecture
_PARAMETERS = 120  # bytes of its struct io_uring_params
_MOUNT_POINT = 4  # the place of the mount point in a row of mountinfo
_OCTAL = {"\\040": " ", "\\011": "\t", "\\012": "\n", "\\134": "\\"}


def file_system(folder: str | Path, root: Path = Path("/")) -> str:
    """Return the type of the file system of a folder, as "ext4", "tmpfs" or "nfs4".

    A missing folder has the type of its nearest existing parent. "" if it is unknown.
    """
    try:
        real = Path(os.path.realpath(folder))
        rows = (root / "proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return ""
    best, kind = -1, ""
    for row in rows:
        fields, _, rest = row.partition(" - ")
        if fields.count(" ") < _MOUNT_POINT:
            continue
        mount = fields.split(" ")[_MOUNT_POINT]
        for code, char in _OCTAL.items():
            mount = mount.replace(code, char)
        # A later mount on one point hides the earlier one.
        if len(mount) >= best and real.is_relative_to(mount):
            best, kind = len(mount), rest.split(" ")[0]
    return kind


def cpu_features(root: Path = Path("/")) -> frozenset[str]:
    """Return the features of the CPU by the kernel's names, empty if unknown."""
    try:
        text = (root / "proc/cpuinfo").read_text(encoding="utf-8")
    except (OSError, ValueError):
        return frozenset()
    for row in text.splitlines():
        name, _, values = row.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(values.split())
    return frozenset()


def clock_source(root: Path = Path("/")) -> str:
    """Return the kernel's source of time, as "tsc" or "hpet", or "" if unknown."""
    file = root / "sys/devices/system/clocksource/clocksource0/current_clocksource"
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""


def locked_limit() -> int | None:
    """Return the limit of locked memory of this process in bytes, or None without a limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def nvidia_driver(root: Path = Path("/")) -> str:
    """Return the version of NVIDIA's driver, or ""."""
    try:
        text = (root / "proc/driver/nvidia/version").read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""
    words = text.splitlines()[0].split() if text else []
    return next((word for word in words if word[0].isdigit() and "." in word), "")


def direct_io(folder: Path) -> str:
    """Return the reason against direct writes to a folder, or "".

    Raises:
        OSError: the folder is unwritable.
    """
    file = folder / f".kvtrie-{secrets.token_hex(8)}"
    try:
        handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return "the file system refuses O_DIRECT"
    finally:
        file.unlink(missing_ok=True)
    try:
        with mmap.mmap(-1, 4096) as page:
            os.pwrite(handle, page, 0)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return "the file system refuses direct writes of 4096 bytes"
    finally:
        os.close(handle)
    return ""


def io_uring() -> str:
    """Return the reason why io_uring is not available to this process, or ""."""
    libc = ctypes.CDLL(None, use_errno=True)
    parameters = ctypes.create_string_buffer(_PARAMETERS)
    handle = libc.syscall(_SETUP, 1, parameters)
    if handle >= 0:
        os.close(handle)
        return ""
    return os.strerror(ctypes.get_errno())
