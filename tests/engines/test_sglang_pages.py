"""Settings of SGLang's storage: a folder or a URL, and what each may have."""

from __future__ import annotations

import re

import numpy as np
import pytest
from kept import memory_folder

from kvtrie import ConfigError
from kvtrie.engines.sglang.pages import PageSettings, PoolSize
from kvtrie.tiers.keyed_disk import KeyedDisk
from kvtrie.tiers.remote.keyed import KeyedRemote

SIZE = 3000
SGLANGS = {
    "backend_name": "kvtrie",
    "module_path": "kvtrie.engines.sglang.storage",
    "class_name": "KvtrieHiCache",
    "interface_v1": 1,
    "prefetch_threshold": 256,
    "hicache_storage_pass_prefix_keys": True,
}


def opened(rank=0, ranks=1, **extra):
    settings = PageSettings.read(SGLANGS | extra)
    pools = {"kv": PoolSize(f"a model {ranks}", SIZE, 1)}
    return settings.open(pools, rank=rank, ranks=ranks)["kv"]


@pytest.mark.parametrize("prefix", ["", "file://"])
def test_a_plain_path_is_a_disk(tmp_path, prefix):
    disk = opened(path=f"{prefix}{tmp_path}", bytes="1MB", ranks=2)
    assert isinstance(disk, KeyedDisk)
    assert disk.store.slots * SIZE < 500_000
    page = np.ones(SIZE, np.uint8)
    assert disk.write_many([(b"a", page), (b"b", page)]) == [True, True]
    assert disk.leading([b"a", b"b", b"c", b"a"]) == 2
    with pytest.raises(ConfigError, match="cannot be written"):
        opened(path=str(tmp_path), blocks=4, ranks=2)
    disk.close()


def test_kept_memory_is_found_by_the_next_server():
    with memory_folder() as folder:
        given = {"keep": str(folder / "kv"), "bytes": 8 * SIZE, "ranks": 2}
        page = np.ones(SIZE, np.uint8)
        for found in (0, 1):
            ranks = [opened(rank=at, **given) for at in range(2)]
            assert [one.leading([b"a"]) for one in ranks] == [found, 0]
            assert isinstance(ranks[0], KeyedDisk)
            assert ranks[0].store.kept
            for one, key in zip(ranks, (b"a", b"b"), strict=True):
                assert one.write_many([(key, page)]) == [True]
            [one.close() for one in ranks]
        assert sorted(file.name for file in folder.iterdir()) == ["kv-0", "kv-1"]
        with pytest.raises(ConfigError, match="keep_replace"):
            opened(**given | {"ranks": 1, "keep": f"{folder / 'kv-0'}"})
        opened(**given | {"ranks": 1, "keep": f"{folder / 'kv-0'}", "keep_replace": True}).close()


def test_a_url_is_a_shared_store(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    given = {"trust_s": 5, "lookup": "all", "secret_file": str(secret), "lookup_s": 1}
    one, two = (opened(path=f"folder:{tmp_path}/kv", **given) for _ in range(2))
    assert isinstance(one, KeyedRemote)
    page = np.ones(SIZE, np.uint8)
    assert one.write_many([(b"a", page)]) == [True]
    assert two.leading([b"a", b"b"]) == 1
    assert opened(path=f"folder:{tmp_path}/kv").leading([b"a"]) == 0  # it has no secret


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({}, "needs a path: a folder, or the URL of a shared store"),
        ({"path": "kv", "room": 3}, "the storage has no 'room': path, bytes"),
        ({"path": "kv", "blocks": 1.5}, "blocks is 1.5"),
        ({"path": "kv", "blocks": 3, "lookup_s": 1}, "lookup_s is given with path 'kv': only a"),
        ({"path": "folder:kv", "bytes": 5}, "bytes is given with path 'folder:kv': a shared store"),
        ({"path": "redis://:hunter2@a/0", "durability": "none"}, "path 'redis://:***@a/0'"),
        ({"path": "redis://a", "lookup_s": 0}, "lookup_s is 0"),
        ({"path": "redis://a", "deadline_s": float("inf")}, "deadline_s is inf"),
        ({"path": "redis://a", "trust_s": 0}, "trust_s of tier 'remote' is 0"),
        ({"path": "redis://a", "lookup": "some"}, "lookup of tier 'remote' is one of all, local"),
        ({"path": "folder:kv", "secret_file": "/nowhere/secret"}, "secret_file /nowhere/secret"),
        (
            {"keep": "kv", "path": "x"},
            "keep is given with path: bytes, blocks, keep,",
        ),
        ({"keep": "kv", "bytes": "20%"}, "bytes is '20%', which is a share of nothing"),
        ({"keep": "kv", "blocks": 1, "keep_replace": 1}, "keep_replace is 1, True or False"),
        ({"path": "kv", "blocks": 1, "keep_replace": True}, "path 'kv': it is for keep"),
        ({"keep": "kv"}, "one of them wanted"),
        ({"path": "nfs:kv"}, "nfs:kv: unknown scheme"),
        ({"path": 5, "blocks": 3}, "a path wanted: expected str"),
    ],
)
def test_a_bad_setting_is_one_clear_error(extra, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=re.escape(said)) as raised:
        opened(**extra)
    assert "hunter2" not in str(raised.value)
    assert not [*tmp_path.iterdir()]
