"""`kvtrie remote`: what it removes, and its errors."""

from __future__ import annotations

import json
import os
import re
import tomllib

import pytest

from kvtrie.cli import main
from kvtrie.sim.config import config_of
from kvtrie.sim.config.lanes import lanes_of
from kvtrie.sim.config.table import Table
from kvtrie.sim.run import run_config
from kvtrie.tiers.remote.check import check_store

MADE = {"format": "segments", "requests": 4}
HOST = [{"kind": kind, "blocks": 4000} for kind in ("gpu", "host")]


def run(capsys, *arguments):
    """Exit status, standard output and error of one command."""
    status = main(["remote", *map(str, arguments)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_gc_removes_what_is_old(tmp_path, capsys):
    for rest, age in (("0" * 62, 1000), ("1" * 62, 0)):
        file = tmp_path / "ab" / rest
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"kvtrieV1" + bytes(40) + bytes.fromhex(f"ab{rest}") + bytes(20))
        os.utime(file, (file.stat().st_mtime - age,) * 2)
    url = f"folder:{tmp_path}?ttl=500"
    status, out, _ = run(capsys, "gc", url, "--json")
    assert (status, json.loads(out)) == (
        0,
        {"url": url, "expired": 1, "staged": 0, "bytes": 100, "kept": 1},
    )
    status, out, _ = run(capsys, "gc", url)
    assert out == "0 expired blocks and 0 staging files removed, 0 bytes; 1 blocks kept\n"


def test_check_prints_operations_and_speeds_and_writes_lanes(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(check_store.__kwdefaults__, "sizes", (1 << 16, 1 << 18))
    url, out = f"folder:{tmp_path}/kv", tmp_path / "lanes.toml"
    status, text, _ = run(capsys, "check", url, "--out", out)
    assert status == 0
    assert text.startswith(f"{url}\n\nok      connect ")
    assert "plain client" in text
    assert f"Lanes written to {out}. Settings of kvtrie sim for this store:\n" in text
    settings = tomllib.loads("".join(text.splitlines(keepends=True)[-2:]))
    status, text, _ = run(capsys, "check", url, "--json", "--out", out)
    document = json.loads(text)
    assert (status, document["ok"], document["url"]) == (0, True, url)
    lanes = lanes_of(Table("lanes", {"path": str(out)}))
    assert {name: lane.bytes_per_s for name, lane in lanes.items()} == {
        name: lane["bytes_per_s"] for name, lane in document["lanes"].items()
    }
    assert [*tmp_path.iterdir()] == [out]
    model = {"layers": 2, "kv_heads": 1, "head_dim": 8}
    made = {"trace": MADE, "model": model, "tiers": HOST, "machines": 2}
    seen = config_of({**made, **settings}, tmp_path)
    assert seen.shared is not None
    for lane in seen.shared.lanes():
        assert (lane.bytes_per_s, lane.latency_ns) == tuple(document["lanes"][lane.name].values())
    assert run_config(seen)["requests"] == 4


def test_gc_refuses_a_folder_of_others_and_removes_nothing(tmp_path, capsys):
    file = tmp_path / "ef" / ("0" * 62)
    file.parent.mkdir()
    file.write_text("an object of another store")
    os.utime(file, (0, 0))
    for words in (["gc", f"folder:{tmp_path}?ttl=1"], ["check", f"folder:{tmp_path}"]):
        status, out, err = run(capsys, *words)
        assert (status, out) == (2, "")
        assert f"kvtrie did not write {file}" in err
    assert [*tmp_path.rglob("*")] == [file.parent, file]


def test_a_check_of_a_store_that_does_not_answer_is_one_line(tmp_path, capsys):
    pytest.importorskip("redis")
    status, out, err = run(capsys, "check", f"unix:{tmp_path}/none", "--out", tmp_path / "x")
    assert (status, out) == (2, "")
    assert err.startswith(f"kvtrie remote: unix:{tmp_path}/none is unreachable: ")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("/mnt/kv", "URL is '/mnt/kv', a URL wanted: 'folder:/mnt/kv' is a folder"),
        ("folder:/nowhere/at/all", "/nowhere/at/all is no folder"),
        ("redis://:hunter2@host", r"redis://:\*\*\*@host: only folder: has files"),
        ("folder:/kv?age=1", "folder: has no option 'age': ttl, io, strict are known"),
    ],
)
def test_a_bad_url_is_one_line(capsys, url, message):
    status, out, err = run(capsys, "gc", url)
    assert (status, out) == (2, "")
    assert err.startswith("kvtrie remote: ")
    assert re.search(message, err)
    assert "hunter2" not in err
