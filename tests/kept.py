"""Engines over a host tier that is kept in a file of a memory file system."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
from keeping import SHAPE, SIZE

from kvtrie import BlockManager, Tier
from kvtrie.tiers import open_pools
from kvtrie.transfer import Executor

MEMORY = Path("/dev/shm")  # noqa: S108 - the file system under test
ENTRY = 96 + 4 * SIZE + 1024 + 16  # bytes of a slot's entry
HEADER = 4096


@contextmanager
def memory_folder():
    """A folder in a memory file system."""
    if not MEMORY.is_dir():
        pytest.skip(f"there is no {MEMORY}")
    folder = Path(tempfile.mkdtemp(dir=MEMORY, prefix="kvtrie-test-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@contextmanager
def kept_serving(path, *, gpu=4, host=16, shape=SHAPE, replace=False, staging=0, **settings):
    """An executor over gpu and a host tier in the file `path`; nothing is saved at the end."""
    tiers = [
        Tier("gpu", blocks=gpu),
        Tier("host", blocks=host, keep=str(path), keep_replace=replace),
    ]
    manager = BlockManager(shape, tiers, block_tokens=SIZE)
    pools = open_pools(shape, tiers, SIZE, staging=staging)
    try:
        with Executor(manager, pools, **{"workers": 1, **settings}) as executor:
            yield executor
    finally:
        if hasattr(pools[1], "close"):
            pools[1].close()


def flip(path, at, bit=0):
    """One bit of a file."""
    with path.open("r+b") as file:
        file.seek(at)
        old = file.read(1)[0]
        file.seek(at)
        file.write(bytes([old ^ 1 << bit]))
