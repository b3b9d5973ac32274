"""`kvtrie disk` over folders in which something else stands in place of a store's files."""

import json
import logging
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from keeping import PAGE, ask, fill, prompt, serving, stores

OUTSIDE = b"not the store's"
PROMPTS = [prompt(seed) for seed in range(6)]
ACTIONS = ("ls", "verify", "gc")

GO = """
import contextlib, io, json, sys
from kvtrie.cli import main

for folder in sys.argv[1:]:
    for action in ("ls", "verify", "gc"):
        print(json.dumps([folder, action]), flush=True)
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                status = main(["disk", action, folder])
            except SystemExit as ended:
                status = ended.code
        print(json.dumps([status, out.getvalue() + err.getvalue()]), flush=True)
"""


def pipe(at, _outside):
    os.mkfifo(at)


def bound(at, _outside):
    folder = os.open(at.parent, os.O_RDONLY | os.O_DIRECTORY)  # the path is longer than a socket's
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(f"/proc/self/fd/{folder}/{at.name}")
    os.close(folder)


def folder(at, _outside):
    at.mkdir()
    (at / "file").write_bytes(OUTSIDE)


def link(at, outside):
    at.symlink_to(outside / "file")


def link_to_a_pipe(at, outside):
    at.symlink_to(outside / "pipe")


def link_to_a_folder(at, outside):
    at.symlink_to(outside / "folder")


def dangling_link(at, outside):
    at.symlink_to(outside / "nothing")


def hard_link(at, outside):
    at.hardlink_to(outside / "file")


def sparse(at, _outside):
    with at.open("wb") as file:
        file.truncate(1 << 40)


KINDS = [
    pipe,
    bound,
    folder,
    link,
    link_to_a_pipe,
    link_to_a_folder,
    dangling_link,
    hard_link,
    sparse,
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder of six blocks."""
    folder = tmp_path_factory.mktemp("whole")
    fill(folder, PROMPTS)
    return folder


@pytest.fixture
def outside(tmp_path):
    """Files that are not the store's, and how they look."""
    outside = tmp_path / "outside"
    (outside / "folder").mkdir(parents=True)
    (outside / "file").write_bytes(OUTSIDE)
    (outside / "folder" / "file").write_bytes(OUTSIDE)
    os.mkfifo(outside / "pipe")
    return outside


def seen(folder):
    """Everything under a folder: what it is, how long, since when, how it begins."""
    found = {}
    for path in folder.rglob("*"):
        stat, start = path.lstat(), b""
        if path.is_file() and not path.is_symlink():
            with path.open("rb") as file:
                start = file.read(PAGE)
        found[str(path)] = (stat.st_mode, stat.st_size, stat.st_mtime_ns, start)
    return found


def going_through(folders):
    """Output of each action on each folder. A call that hangs is killed; 27 calls may take their
    time."""
    words = [sys.executable, "-c", GO, *map(str, folders)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired as hung:
        pytest.fail(f"killed in {hung.stdout.decode().splitlines()[-1]}")
    assert (done.returncode, done.stderr) == (0, "")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {
        (Path(place), action): tuple(text)
        for (place, action), text in zip(lines[::2], lines[1::2], strict=True)
    }


@pytest.mark.parametrize(
    "name",
    [
        "lock",
        "manifest",
        "segment-00000",
        pytest.param("manifest.tmp", marks=pytest.mark.deep),
        pytest.param("pair", marks=pytest.mark.deep),
    ],
)
def test_any_kind_of_file_ends_as_a_miss_with_a_reason(whole, tmp_path, outside, name):
    folders = {}
    for kind in KINDS:
        place = tmp_path / kind.__name__
        shutil.copytree(whole, place)
        (store,) = stores(place)
        (store / name).unlink(missing_ok=True)
        kind(store / name, outside)
        folders[place] = kind
    before = seen(outside)
    outcomes = going_through(folders)
    assert seen(outside) == before
    for (place, action), (status, text) in outcomes.items():
        assert "Traceback" not in text
        kind = folders[place]
        if name == "lock" and kind is not sparse:
            assert status == 0
            assert "lock" in text
            assert "free to write" not in text
        elif name == "manifest":
            assert status == 2
            assert f"{name}: " in text
        elif name == "segment-00000" and action == "verify":
            assert status == 1
            assert "6 blocks read" in text
        elif name == "pair" and kind not in (hard_link, sparse):
            assert status == 2
            assert f"{name}: " in text
        else:
            assert status == 0


def test_what_is_no_folder_of_its_own_is_no_store_and_not_removed(whole, tmp_path, outside):
    (store,) = stores(whole)
    folders = {}
    for kind in KINDS:
        place = tmp_path / kind.__name__
        place.mkdir()
        for name in (store.name, f"{store.name}.removed"):
            kind(place / name, outside)
        if kind is folder:  # that one is ours to remove
            shutil.rmtree(place / f"{store.name}.removed")
        folders[place] = seen(place)
    before = seen(outside)
    for (place, _), (status, _) in going_through(folders).items():
        assert status == 2
        assert seen(place) == folders[place]
    assert seen(outside) == before


def test_removing_a_store_leaves_what_its_links_name(whole, tmp_path, outside):
    place = tmp_path / "place"
    shutil.copytree(whole, place)
    (store,) = stores(place)
    gone = store.rename(place / f"{store.name}.removed")
    for kind in (link, link_to_a_folder, dangling_link, hard_link):
        kind(gone / kind.__name__, outside)
    fill(place, PROMPTS[:1])
    before = seen(outside)
    assert going_through([place])[place, "gc"][0] == 0
    assert [path.name for path in place.iterdir()] == [store.name]
    assert seen(outside) == before


def test_an_engine_over_a_pipe_as_lock_reads_and_names_the_reason(whole, tmp_path, caplog):
    place = tmp_path / "place"
    shutil.copytree(whole, place)
    (store,) = stores(place)
    (store / "lock").unlink()
    os.mkfifo(store / "lock")
    with caplog.at_level(logging.WARNING), serving(place) as executor:
        assert executor.pools[2].read_only
        assert executor.restore() == len(PROMPTS)
        assert [ask(executor, tokens) for tokens in PROMPTS] == [len(PROMPTS[0])] * len(PROMPTS)
    assert "lock: a pipe, not a file; without it the store is read-only" in caplog.text


def test_an_engine_over_a_stretched_manifest_finds_everything(whole, tmp_path):
    place = tmp_path / "place"
    shutil.copytree(whole, place)
    (store,) = stores(place)
    with (store / "manifest").open("r+b") as file:
        file.truncate(1 << 40)
    with serving(place) as executor:
        assert executor.restore() == len(PROMPTS)
        executor.save()
    assert (store / "manifest").stat().st_size < 16 * PAGE
