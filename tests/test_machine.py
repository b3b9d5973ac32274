"""The machine: what is found of file systems, limits and kernel features."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from kvtrie.settings.machine import (
    clock_source,
    cpu_features,
    direct_io,
    file_system,
    io_uring,
    locked_limit,
    nvidia_driver,
)

MOUNTS = """\
22 1 259:2 / / rw,relatime shared:1 - ext4 /dev/root rw
30 22 0:26 / /run/mem rw - tmpfs tmpfs rw
31 22 0:40 / /data rw shared:3 master:2 - nfs4 server:/x rw
32 22 0:41 / /data/a\\040b rw - xfs /dev/sdb rw
33 22 0:42 / /data rw - btrfs /dev/sdc rw
"""
MALFORMED = ("", "34", "35 22 0:43 /", "36 22 0:44 / - ext3 /dev/sdd rw", " - zfs tank rw")


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        ("/", "ext4"),
        ("/run/mem", "tmpfs"),
        ("/run/mem/a", "tmpfs"),
        ("/run/memx", "ext4"),
        ("/data/kv/none", "btrfs"),  # the later mount hides the earlier one
        ("/data/a b/kv", "xfs"),
    ],
)
def test_a_folder_has_the_file_system_of_the_mount_above_it(tmp_path, folder, kind):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text(MOUNTS)
    assert file_system(folder, tmp_path) == kind


@pytest.mark.parametrize("row", MALFORMED)
def test_malformed_mounts_are_skipped(tmp_path, row):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text(f"{row}\n{MOUNTS}{row}\n")
    assert file_system("/data/kv", tmp_path) == "btrfs"
    (tmp_path / "proc/self/mountinfo").write_text(f"{row}\n")
    assert file_system("/data/kv", tmp_path) == ""


def test_what_a_system_does_not_report_is_empty(tmp_path):
    assert file_system("/", tmp_path) == ""
    assert file_system("/")
    assert nvidia_driver(tmp_path) == clock_source(tmp_path) == ""
    assert not cpu_features(tmp_path)


@pytest.mark.parametrize("row", ["flags\t\t: fpu sse2 avx2", "Features\t: avx2 sse2"])
def test_the_features_of_the_first_cpu_are_reported(tmp_path, row):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(
        f"processor\t: 0\n{row}\n\nprocessor\t: 1\nflags\t: fpu\n"
    )
    assert {"sse2", "avx2"} <= cpu_features(tmp_path)
    (tmp_path / "proc/cpuinfo").write_text("processor\t: 0\n")
    assert not cpu_features(tmp_path)


def test_the_clock_source(tmp_path):
    file = tmp_path / "sys/devices/system/clocksource/clocksource0/current_clocksource"
    file.parent.mkdir(parents=True)
    file.write_text("kvm-clock\n")
    assert clock_source(tmp_path) == "kvm-clock"


def test_the_version_of_the_driver(tmp_path):
    file = tmp_path / "proc/driver/nvidia/version"
    file.parent.mkdir(parents=True)
    file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan\nGCC\n")
    assert nvidia_driver(tmp_path) == "570.86.15"
    file.write_text("")
    assert nvidia_driver(tmp_path) == ""


def test_the_limit_of_locked_memory(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, 5))
    assert locked_limit() is None
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1 << 20, 5))
    assert locked_limit() == 1 << 20


def test_direct_writes_leave_no_file(tmp_path):
    assert direct_io(tmp_path) in ("", "the file system refuses O_DIRECT")
    assert not list(tmp_path.iterdir())
    with pytest.raises(OSError, match="No such file"):
        direct_io(tmp_path / "none")


def test_the_queue_of_the_kernel_is_there_or_a_reason_is():
    before = len(list(Path("/proc/self/fd").iterdir()))
    assert isinstance(io_uring(), str)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
