"""Locks of files that a fork shares: they end with the writer, not with its forks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from forked_writer import KINDS, may_write
from kept import memory_folder

HERE = Path(__file__).resolve().parent


@pytest.fixture
def folder():
    """A folder for files of any kind."""
    with memory_folder() as folder:
        yield folder


def descriptors(folder):
    """This process's descriptors of files in a folder."""
    for one in Path("/proc/self/fd").iterdir():
        if one.is_symlink() and str(one.readlink()).startswith(f"{folder}/"):
            yield int(one.name)


@pytest.mark.parametrize("kind", KINDS)
def test_closing_releases_a_lock_that_a_fork_still_shares(folder, kind):
    opened, writes = KINDS[kind]
    files = opened(folder / kind)
    assert writes(files)
    inherited = [os.dup(one) for one in descriptors(folder)]
    files.close()
    try:
        assert inherited
        assert may_write(kind, folder / kind)
    finally:
        for one in inherited:
            os.close(one)


def test_a_fork_keeps_no_lock_of_its_parent_and_takes_its_own(folder):
    with subprocess.Popen(
        [sys.executable, HERE / "forked_writer.py", folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": f"{HERE}:{HERE.parent}"},
    ) as writer:
        try:
            assert json.loads(writer.stdout.readline()) == list(KINDS)
            assert [kind for kind in KINDS if may_write(kind, folder / kind)] == []
        finally:
            writer.kill()
        writer.wait()
        # The fork lives until this block closes its standard input.
        assert [kind for kind in KINDS if may_write(kind, folder / kind)] == list(KINDS)
