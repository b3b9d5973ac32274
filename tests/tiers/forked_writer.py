"""A writer with a fork: `python forked_writer.py FOLDER`.

The fork writes to files of its own, prints the kinds it may write to, and ends when its standard
input does. The writer waits to be killed.
"""

import json
import os
import signal
import sys
from pathlib import Path

from keeping import SHAPE, SIZE

from kvtrie import Tier
from kvtrie.tiers import DiskStorage
from kvtrie.tiers.kept_tier import kept_pool
from kvtrie.tiers.keyed_disk import KeyedDisk

KEYED = {"meaning": "a model", "size": 3000, "blocks": 8}


def kept(path):
    """A kept host pool, or None if another process has its lock."""
    return kept_pool(SHAPE, Tier("host", blocks=8, keep=str(path)), SIZE, patience_s=0)


# How files of each kind are opened, and whether this process may write to them.
KINDS = {
    "disk": (lambda path: DiskStorage(path, SHAPE, 8, SIZE), lambda disk: not disk.read_only),
    "keyed-disk": (lambda path: KeyedDisk(path, **KEYED), lambda disk: not disk.read_only),
    "kept-pool": (kept, lambda pool: pool is not None),
    "kept-keyed": (lambda path: KeyedDisk(path, **KEYED, keep=True), lambda disk: disk.store.kept),
}


def may_write(kind, path):
    """Whether this process may write to files. They are closed again."""
    opened, writes = KINDS[kind]
    files = opened(path)
    if files is None:
        return False
    found = writes(files)
    files.close()
    return found


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    held = [opened(folder / kind) for kind, (opened, _) in KINDS.items()]
    if os.fork():
        signal.pause()
    own = [kind for kind in KINDS if may_write(kind, folder / f"{kind}-of-the-fork")]
    sys.stdout.write(json.dumps(own) + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    os._exit(0)
