"""Output files: what is replaced, what is written through, and what is refused."""

import argparse
import json
import os
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvtrie.cli import _parser, main
from kvtrie.cli.output_file import output_file
from kvtrie.errors import ConfigError, KvtrieError
from kvtrie.output import write_output, writing

SETTINGS = """
seed = 0
machines = 1
trace = {path="t.jsonl", format="tokens"}
model = {layers=1, kv_heads=1, head_dim=16, dtype="float16"}
manager = {block_tokens=16, policy="lru", load="all", keep=1}
engine = {kind="serial", wait="all"}
cost = {kind="affine", ns_per_token=1000, alpha=0.0}
router = {kind="round-robin"}
tiers = [{kind="gpu", blocks=4}]
"""


def make(path, mode, device=0):
    try:
        os.mknod(path, mode | 0o666, device)
        if stat.S_ISCHR(mode):
            with path.open("wb"):
                pass
    except PermissionError:
        pytest.skip("no device node can be made or used here")


def fail(path):
    with writing(path) as file:
        file.write(b"half")
        raise ValueError("in the run")


@pytest.fixture
def simulation(tmp_path):
    row = {"arrival_ns": 0, "tokens": list(range(40)), "output_tokens": 1}
    (tmp_path / "t.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "sim.toml").write_text(SETTINGS)
    return str(tmp_path / "sim.toml")


def test_a_regular_file_is_replaced_whole_and_keeps_its_permissions(tmp_path):
    path, other = tmp_path / "out", tmp_path / "other name"
    path.write_text("old")
    path.chmod(0o640)
    os.link(path, other)
    write_output(path, "new")
    assert (path.read_text(), other.read_text()) == ("new", "old")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    with pytest.raises(ValueError, match="in the run"):
        fail(path)
    assert path.read_text() == "new"
    assert sorted(tmp_path.iterdir()) == sorted([path, other])


def test_a_new_file_is_there_whole_or_not_at_all(tmp_path):
    path = tmp_path / "out"
    with pytest.raises(ValueError, match="in the run"):
        fail(path)
    assert not list(tmp_path.iterdir())
    write_output(path, "é")
    assert path.read_bytes() == "é".encode()
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_and_the_file_that_it_names_is_written(tmp_path, there):
    target, link = tmp_path / "folder" / "target", tmp_path / "link"
    target.parent.mkdir()
    if there:
        target.write_text("old and longer")
    link.symlink_to(target)
    write_output(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"


def test_a_named_pipe_is_written_and_stays(tmp_path):
    path, read = tmp_path / "pipe", []
    os.mkfifo(path)
    reader = threading.Thread(target=lambda: read.append(path.read_bytes()))
    reader.start()
    write_output(path, "through the pipe")
    reader.join()
    assert read == [b"through the pipe"]
    assert stat.S_ISFIFO(path.lstat().st_mode)


@pytest.mark.parametrize("minor", [3, 7])  # null and full
@pytest.mark.parametrize("linked", [False, True])
def test_a_character_device_is_written_and_stays(tmp_path, minor, linked):
    path = device = tmp_path / "device"
    make(device, stat.S_IFCHR, os.makedev(1, minor))
    if linked:
        path = tmp_path / "link"
        path.symlink_to(device)
    if minor == 3:
        write_output(path, "gone")
    else:
        with pytest.raises(ConfigError, match=r"cannot write .*: No space left on device"):
            write_output(path, "gone")
    assert stat.S_ISCHR(device.lstat().st_mode)
    assert path.is_symlink() == linked


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("kind", ["a folder", "a socket", "a block device"])
def test_other_kinds_are_refused_before_anything_is_written(tmp_path, kind, linked, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = Path("out")
    if kind == "a folder":
        path.mkdir()
    elif kind == "a socket":
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind("out")
    else:
        make(path, stat.S_IFBLK, os.makedev(7, 250))
    if linked:
        path = Path("link")
        path.symlink_to("out")
    before = Path("out").lstat()
    with pytest.raises(ConfigError, match=f"cannot write {path}: it is {kind}"):
        write_output(path, "new")
    with pytest.raises(KvtrieError, match=kind):
        output_file(str(path))
    assert Path("out").lstat().st_ino == before.st_ino


def options(parser, words=()):
    """Every option of every command: the words before it, and the option."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from options(inner, (*words, name))
        else:
            yield words, action


def test_every_option_of_the_cli_that_writes_a_file_is_known():
    written = {
        " ".join([*words, *(option.option_strings[:1] or [option.metavar])])
        for words, option in options(_parser())
        if option.type is output_file
    }
    run = {f"sim run --{name}" for name in ("requests", "csv", "perfetto", "plot", "decisions")}
    assert written - run == {
        "advise --plot",
        "calibrate --out",
        "demo --picture",
        "demo --save",
        "fuse --measure",
        "fuse --plot",
        "map --out",
        "profile --out",
        "remote check --out",
        "replay --plot",
        "replay --save",
        "sim calibrate --write",
        "sim capacities --csv",
        "sim capacities --plot",
        "sim compare --csv",
        "sim sweep --csv",
        "top --svg",
        "trace convert OUT",
    }
    assert run <= written
    # Paths of the other options are read, or name folders; files of `sim` are read and added to,
    # and a recording is a new file, readable by its owner alone.
    others = {
        " ".join([*words, *option.option_strings[:1]])
        for words, option in options(_parser())
        if option.type is Path and option.option_strings and option.metavar == "FILE"
    }
    sim = {"sim size --results", "sim sweep --results", "sim calibrate --seen"}
    assert others == {*sim, "advise --record", "calibrate --texts", "fuse --deviation"}


@pytest.mark.parametrize("option", ["--requests", "--csv", "--perfetto", "--plot", "--decisions"])
def test_a_full_device_or_a_link_keep_what_they_are_under_every_option(
    tmp_path, simulation, capsys, option
):
    full, link, target = tmp_path / "full.png", tmp_path / "link.png", tmp_path / "target"
    make(full, stat.S_IFCHR, os.makedev(1, 7))
    target.write_text("")
    link.symlink_to(target)
    assert main(["sim", "run", simulation, option, str(full)]) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert main(["sim", "run", simulation, option, str(link)]) == 0
    assert stat.S_ISCHR(full.lstat().st_mode)
    assert (link.is_symlink(), target.stat().st_size > 0) == (True, True)


def test_results_that_are_read_and_added_to_are_a_regular_file(tmp_path, simulation, capsys):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    words = ["sim", "sweep", simulation, "--over", "seed=1,2", "--results", str(pipe)]
    assert main(words) == 2
    assert "a regular file wanted" in capsys.readouterr().err


def run(words, **more):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    return subprocess.run(
        [sys.executable, "-m", "kvtrie", *words],
        env=environment,
        check=False,
        stderr=subprocess.PIPE,
        **more,
    )


def test_the_own_output_is_written_in_its_place_and_may_be_full(tmp_path, simulation):
    """As `kvtrie ... > all`: what is printed follows what `--requests /dev/stdout` wrote."""
    printed, full = tmp_path / "all", tmp_path / "full"
    with printed.open("wb") as file:
        words = ["sim", "run", simulation, "--json", "--requests", f"/proc/self/fd/{1}"]
        ran = run(words, stdout=file)
    assert ran.returncode == 0, ran.stderr
    line, figures = (json.loads(line) for line in printed.read_text().splitlines())
    assert (line["id"], figures["requests"]) == (0, 1)
    make(full, stat.S_IFCHR, os.makedev(1, 7))
    with full.open("wb") as file:
        ran = run(["sim", "run", simulation, "--json"], stdout=file)
    assert ran.returncode == 2
    assert ran.stderr.decode().splitlines() == [
        "kvtrie sim: cannot write the output: No space left on device"
    ]
