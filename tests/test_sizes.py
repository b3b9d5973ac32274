"""Sizes and paths as people write them, in every place that takes them."""

import os
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtrie import ModelShape, Tier
from kvtrie.errors import ConfigError
from kvtrie.settings import sizes
from kvtrie.settings.sizes import all_disk, all_memory, check_exists, free_disk, free_memory, size
from kvtrie.tiers import DiskStorage, open_pools
from kvtrie.tiers.keyed_disk import KeyedDisk
from kvtrie.transfer import Layerwise

SHAPE = ModelShape(layers=2, kv_heads=1, head_dim=16, fingerprint="sized")
UNITS = {"B": 1} | {
    prefix + end: base**power
    for end, base in (("B", 1000), ("iB", 1024))
    for power, prefix in enumerate("KMGTPE", 1)
}


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [
        ("8GB", 8 * 10**9),
        ("8 GB", 8 * 10**9),
        ("8gb", 8 * 10**9),
        ("512MiB", 512 << 20),
        ("1.5TiB", 3 << 39),
        ("8_000_000_000B", 8 * 10**9),
        ("8e9 B", 8 * 10**9),
        (8.0, 8),
        ("0.1kB", 100),
        (8e9, 8 * 10**9),
        (77, 77),
    ],
)
def test_sizes(text, bytes_):
    assert size("bytes", text) == bytes_
    tier = Tier("host", bytes=text, io_budget=text)
    staged = Layerwise(staging_bytes=text).staging_bytes
    assert (tier.bytes, tier.io_budget, staged) == (bytes_, bytes_, bytes_)


@given(st.decimals(0, 10**6, places=3), st.sampled_from(sorted(UNITS)))
def test_a_size_is_its_number_times_its_unit(number, unit):
    exact = int(Fraction(number) * UNITS[unit])
    if 1 <= exact < 2**63:
        assert size("bytes", f"{number}{unit}") == exact
    else:
        with pytest.raises(ConfigError, match="wanted"):
            size("bytes", f"{number}{unit}")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("8", "with a unit; did you mean '8GB'"),
        ("8e9", "with a unit$"),
        ("8G", "the units are B, KB, MB"),
        ("8 bytes", "the units are"),
        ("8Gbit", "the units are"),
        ("", "or a size"),
        ("-8GB", "or a size"),
        ("nan", "or a size"),
        ("GB", "or a size"),
        ("25%", "a share of nothing here"),
        ("0GB", "is 0, 1 to"),
        ("1e30B", "1 to"),
        ("9EB" * 99, "or a size"),
        (5.5, "did you mean '5.5GB'"),
        ("5.5", "did you mean '5.5GB'"),
        (float("nan"), "a whole number"),
        (True, "a whole number"),
        (None, "a whole number"),
        ([8], "a whole number"),
    ],
)
def test_what_is_no_size_is_refused_by_what_it_is(given, message):
    with pytest.raises(ConfigError, match=message):
        size("bytes", given)


def test_a_share_is_of_what_is_free(tmp_path):
    assert size("bytes", "25%", of=lambda: 1001) == 250
    assert size("bytes", "12.5%", of=lambda: 1000) == 125
    for wrong in ("0%", "101%", "%"):
        with pytest.raises(ConfigError, match="wanted"):
            size("bytes", wrong, of=lambda: 1000)
    free = free_memory()
    assert free / 10 < Tier("host", bytes="25%").bytes < free
    disk = Tier("disk", bytes="50%", path=str(tmp_path / "not there yet")).bytes
    assert all_disk(tmp_path) > disk > 0
    for tier in ({"kind": "gpu"}, {"kind": "remote"}, {"kind": "disk"}):
        with pytest.raises(ConfigError, match="a share of nothing here"):
            Tier(bytes="25%", **tier)


def test_what_a_folder_holds_counts_as_free_so_that_a_restart_finds_the_same_room(tmp_path):
    store = tmp_path / "kv" / "0123456789abcdef"
    store.mkdir(parents=True)
    (store / "segment-00000").write_bytes(os.urandom(4 << 20))
    (tmp_path / "kv" / "another file").write_bytes(os.urandom(4 << 20))
    taken = (store / "segment-00000").stat().st_blocks * 512
    assert sum(sizes._taken(tmp_path / "kv")) == taken
    assert list(sizes._taken(tmp_path / "none")) == []
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    # Other processes use the same disk.
    assert free_disk(tmp_path / "kv") == pytest.approx(free + taken, abs=1 << 30)


def test_a_relative_folder_in_a_directory_that_is_gone(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for refuse in (
        lambda: DiskStorage("kv", SHAPE, 4, 16),
        lambda: KeyedDisk("kv", meaning="a model", size=4096, bytes="1MB"),
        lambda: Tier("disk", bytes="1%", path="kv"),
    ):
        with pytest.raises(ConfigError, match="the folder kv cannot be looked at: No such file"):
            refuse()


def system(root, *, total, available, groups="", files=()):
    (root / "proc" / "self").mkdir(parents=True)
    rows = f"MemTotal: {total >> 10} kB\nMemAvailable: {available >> 10} kB\n"
    (root / "proc" / "meminfo").write_text(rows)
    (root / "proc" / "self" / "cgroup").write_text(groups)
    for path, text in dict(files).items():
        place = root / "sys" / "fs" / "cgroup" / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    return root


GB = 1 << 30
V2 = {
    "a/memory.max": f"{8 * GB}\n",
    "a/memory.current": f"{6 * GB}\n",
    "a/memory.stat": f"anon 1\ninactive_file {GB}\n",
    "a/b/memory.max": "max\n",
    "a/b/memory.current": "1\n",
    "a/b/memory.stat": "",
}
ROOT = {"memory.max": f"{4 * GB}", "memory.current": f"{GB}", "memory.stat": "inactive_file 0"}
V1 = {
    "memory/memory.limit_in_bytes": f"{2**63 - 4096}",
    "memory/memory.usage_in_bytes": f"{GB}",
    "memory/memory.stat": "total_inactive_file 0",
    "memory/x/memory.limit_in_bytes": f"{5 * GB}",
    "memory/x/memory.usage_in_bytes": f"{2 * GB}",
    "memory/x/memory.stat": f"inactive_file 0\ntotal_inactive_file {GB}",
}


@pytest.mark.parametrize(
    ("groups", "files", "free", "there"),
    [
        ("", {}, 32 * GB, 64 * GB),
        ("0::/a/b\n", V2, 3 * GB, 8 * GB),
        ("0::/\n", ROOT, 3 * GB, 4 * GB),
        ("0::/not/mounted/here\n", ROOT, 3 * GB, 4 * GB),
        ("4:memory:/x\n3:cpu,cpuacct:/x\n", V1, 4 * GB, 5 * GB),
        ("4:memory:/gone\n", V1, 32 * GB, 64 * GB),
    ],
)
def test_free_memory_is_that_of_the_control_group(tmp_path, groups, files, free, there):
    root = system(tmp_path, total=64 * GB, available=32 * GB, groups=groups, files=files)
    assert (free_memory(root), all_memory(root)) == (free, there)


def test_more_than_there_is_is_refused_before_anything_is_made(tmp_path):
    memory, disk = all_memory(), all_disk(tmp_path)
    block = SHAPE.block_bytes(16)
    with pytest.raises(ConfigError, match=f"the memory of cpu has {memory}"):
        open_pools(SHAPE, [Tier("host", blocks=memory // block + 2)], 16)
    if disk // block < 2**32 - 2:
        with pytest.raises(ConfigError, match="its file system has"):
            DiskStorage(tmp_path / "kv", SHAPE, disk // block + 2, 16)
    with pytest.raises(ConfigError, match="its file system has"):
        KeyedDisk(tmp_path / "kv", meaning="a model", size=1 << 30, blocks=disk // (1 << 30) + 2)
    assert not (tmp_path / "kv").exists()
    with pytest.raises(ConfigError, match="no room for a block"):
        KeyedDisk(tmp_path / "kv", meaning="a model", size=1 << 20, bytes="1MB")
    with pytest.raises(ConfigError, match="did you mean '5GB'"):
        KeyedDisk(tmp_path / "kv", meaning="a model", size=1 << 20, bytes=5.0)
    with pytest.raises(ConfigError, match=r"which is 0 blocks of 4096: .* did you mean '5GB'"):
        Tier("host", bytes=5.0).room(SHAPE, 16)
    with pytest.raises(ConfigError, match="which is 0 blocks of 4096"):
        Tier("host", bytes="4KB").room(SHAPE, 16)
    check_exists("a pool", 8, 0, "a system that does not tell")


def test_a_disk_in_a_home_folder_is_there(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    tier = Tier("disk", bytes="10MB", path="~/kv")
    (storage,) = open_pools(SHAPE, [tier], 16)
    storage.close()
    assert [path.name for path in tmp_path.iterdir()] == ["kv"]
