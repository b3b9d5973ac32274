"""`kvtrie remote`: what it removes, and its errors."""

from __future__ import annotations

import json
import os
import re

import pytest

from kvtrie.cli import main


def run(capsys, *arguments):
    """Exit status, standard output and error of one command."""
    status = main(["remote", *map(str, arguments)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_gc_removes_what_is_old(tmp_path, capsys):
    for name, age in ((f"ab/{'0' * 62}", 1000), (f"ab/{'1' * 62}", 0)):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(bytes(100))
        os.utime(file, (file.stat().st_mtime - age,) * 2)
    url = f"folder:{tmp_path}?ttl=500"
    status, out, _ = run(capsys, "gc", url, "--json")
    assert (status, json.loads(out)) == (
        0,
        {"url": url, "expired": 1, "staged": 0, "bytes": 100, "kept": 1},
    )
    status, out, _ = run(capsys, "gc", url)
    assert out == "0 expired blocks and 0 staging files removed, 0 bytes; 1 blocks kept\n"


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
