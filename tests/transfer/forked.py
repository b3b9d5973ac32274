"""A process that forks while its executor and disk tier are at work; the child tries everything.

Started with a folder by `test_fork.py`. Its last line is JSON: what each of the child's calls has
raised, how the child ended, and whether the files were the same afterwards. The parent goes on
during that, and ends without closing anything.
"""

import gc
import json
import os
import signal
import sys
import tempfile
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch
from rig import SHAPE, SIZE, Gate, prompt, store

from kvtrie import BlockManager, Index, Tier
from kvtrie.tiers import DiskStorage, open_pools
from kvtrie.transfer import Executor

BLOCKS = 12
PATIENCE_S = 60


def files(folder):
    """Paths and digests of all files in a folder."""
    found = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    return [(str(path), blake2b(path.read_bytes()).hexdigest()) for path in found]


def calls(executor, disk, lease):
    """Every call of both, by name."""
    key, layers, memory = bytes(32), (0, 4), torch.empty(4, SIZE * 64, dtype=torch.uint8)
    files = disk.store
    return {
        "poll": executor.poll,
        "wait": lambda: executor.wait(lease),
        "drain": executor.drain,
        "cancel": executor.cancel,
        "flush": executor.flush,
        "save": executor.save,
        "restore": executor.restore,
        "used": lambda: executor.used(np.zeros(1, np.uint64)),
        "claims.acquire": lambda: executor.claims.acquire(lambda: lease),
        "claims.claim": lambda: executor.claims.claim(1),
        "close": executor.close,
        "disk.read": lambda: disk.read(key, 0, layers, memory),
        "disk.write": lambda: disk.write(key, 0, layers, memory, b""),
        "disk.read_many": lambda: disk.read_many([(key, 0, layers, memory)]),
        "disk.recall": disk.recall,
        "disk.keep": lambda: disk.keep(Index()),
        "disk.note_uses": lambda: disk.note_uses(Index()),
        "disk.close": disk.close,
        "store.gc": files.gc,
        "store.verify": files.verify,
        "store.remove": lambda: files.remove(0),
        "store.sync": files.sync,
        "store.reasons": files.reasons,
        "store.blocks": lambda: files.blocks(0),
    }


def child(executor, disk, lease, report):
    """Make every call that a forked worker could make, and then end as any process does."""
    signal.alarm(PATIENCE_S)  # a call that hangs ends it
    raised = {}
    for name, call in calls(executor, disk, lease).items():
        try:
            call()
        except Exception as error:  # noqa: BLE001 - it is reported
            raised[name] = (type(error).__name__, str(error))
        else:
            raised[name] = None
    Path(report).write_text(json.dumps(raised))
    gc.collect()


def main(folder):
    """Fork with a copy under way; in the child, leave every block and exit."""
    report = Path(tempfile.mkdtemp(), "report")
    tiers = [Tier("gpu", blocks=16), Tier("host", blocks=32), Tier("disk", blocks=64)]
    manager = BlockManager(SHAPE, tiers, block_tokens=SIZE)
    gpu, host = *open_pools(SHAPE, tiers[:1], SIZE), Gate(SHAPE, 32, SIZE)
    with (
        DiskStorage(folder, SHAPE, 64, SIZE) as disk,
        Executor(manager, [gpu, host, disk], workers=1) as executor,
    ):
        host.open()
        for seed in range(BLOCKS // 3):
            store(executor, prompt(seed, 3), seed)
        executor.save()
        before = files(folder)
        host.shut()
        lease = manager.acquire(prompt(100, 10), now=executor.clock())  # stores what it evicts
        executor.poll()
        pid = os.fork()
        if not pid:
            child(executor, disk, lease, report)
            sys.exit(0)  # through both blocks
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        same = files(folder) == before
        host.open()
        executor.wait(lease)
        executor.drain()
        executor.save()
        raised = json.loads(report.read_text()) if report.exists() else {}
        news = {"pids": [os.getpid(), pid], "raised": raised, "status": status, "same": same}
        sys.stdout.write(json.dumps(news) + "\n")
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1])
