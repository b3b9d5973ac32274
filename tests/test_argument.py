"""`argument`: settings take plain numbers and paths of any kind, and name what they refuse."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from kvtrie import (
    Lane,
    LayerGroup,
    Layout,
    ModelShape,
    Retain,
    Scope,
    Tier,
)
from kvtrie.errors import ConfigError
from kvtrie.settings.argument import folder
from kvtrie.tiers import DiskStorage
from kvtrie.tiers.keyed_disk import KeyedDisk

MODEL = ModelShape(layers=4, kv_heads=2, head_dim=8, fingerprint="settings")
SHAPE = ModelShape(layers=2, kv_heads=1, head_dim=16, fingerprint="paths")


def test_numbers_of_numpy_and_whole_floats_become_plain_numbers():
    """Settings keep plain Python, whatever they were given."""
    eight = [8, 8.0, np.int64(8), np.uint8(8), np.float32(8), np.array(8)]
    assert {Tier("gpu", bytes=size) for size in eight} == {Tier("gpu", bytes=8)}
    assert {type(Tier("gpu", bytes=size).bytes) for size in eight} == {int}
    assert Tier("gpu", bytes=8e9).bytes == 8_000_000_000
    assert ModelShape(np.int32(4), 2.0, np.int64(8), fingerprint="settings") == MODEL
    assert LayerGroup(np.arange(3)) == LayerGroup((0, 1, 2))
    assert Lane("up", np.float64(12e9)) == Lane("up", 12_000_000_000)
    assert Tier("gpu", blocks=1, layer_slots=np.array([1])[0] == 1).layer_slots is True
    assert Scope(extra=np.array([], dtype=object)) == Scope()
    assert Retain(session="s", ttl=np.int64(5)).ttl == 5
    layout = Layout(strides=np.arange(1, 7))
    assert layout.digest() == Layout(strides=(1, 2, 3, 4, 5, 6)).digest()
    pickle.dumps([layout, Tier("gpu", bytes=np.float32(8))])


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ("~/kv", "{home}/kv"),
        ("~", "{home}"),
        ("./~", "./~"),
        ("file:///data/kv", "/data/kv"),
        ("FILE://localhost/data/k%20v", "/data/k v"),
        ("/data/a:b", "/data/a:b"),
        ("kv", "kv"),
    ],
)
def test_paths(monkeypatch, tmp_path, given, path):
    monkeypatch.setenv("HOME", str(tmp_path))
    path = path.format(home=tmp_path)
    assert folder("path", given) == path
    assert Tier("disk", blocks=4, path=given).path == path


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("$HOME/kv", "variables are not expanded"),
        ("/data/${USER}", "variables are not expanded"),
        ("s3://bucket/kv", "s3:// is not supported"),
        ("redis://host:6379", "redis:// is not supported"),
        ("https://host/kv", "https:// is not supported"),
        ("file://host/kv", "on this machine"),
        ("file:///kv?x=1", "on this machine"),
        ("file:///kv?", "'\\?' is no part of .* write %3F"),
        ("file:///kv#1", "'#' is no part of .* write %23"),
        ("file:///kv#", "'#' is no part of .* write %23"),
        ("file:///k\tv", "write %09"),
        ("file:///50%", "'%' is no part of .* write %25"),
        ("file://[", "Invalid IPv6 URL"),
        ("file://", "a path wanted"),
        ("file:///a%00b", "a path wanted"),
        ("~\0/kv", "a path wanted"),
        ("~nobody-of-that-name/kv", "no such user"),
    ],
)
def test_what_is_no_path_here_is_refused_by_name(tmp_path, monkeypatch, given, message):
    monkeypatch.chdir(tmp_path)
    for refuse in (
        lambda: Tier("disk", blocks=4, path=given),
        lambda: DiskStorage(given, SHAPE, 4, 16),
        lambda: KeyedDisk(given, meaning="a model", size=4096, blocks=4),
    ):
        with pytest.raises(ConfigError, match=message):
            refuse()
    assert not list(tmp_path.iterdir())
