"""Two machines on a Mooncake store: A lends memory or a disk, B has none and reads from A.

A is a process that computes prompts, ends its requests and stays; it is killed and comes back. B is
this process. Every byte that B finds is compared. `test_mooncake_store` runs this file in a network
namespace, because Mooncake's clients listen on every address.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager

import pytest
import torch
from tests import namespace, store_servers
from tests.remote_requests import (
    BLOCKS,
    DEADLINE_S,
    PREFETCH_S,
    SIZE,
    WrongBlockError,
    prompts_of,
    request,
    serving,
)

pytestmark = pytest.mark.skipif(
    not namespace.INSIDE, reason="test_mooncake_store.py runs it in a network namespace"
)

PROMPTS = prompts_of()
TOKENS = BLOCKS * SIZE
STORED = len({tuple(each[:end]) for each in PROMPTS for end in range(SIZE, TOKENS + 1, SIZE)})
SLACK_S = 0.5  # of the machine's scheduler
LENDER = """
import sys
from tests.remote_requests import prompts_of, request, serving
with serving(sys.argv[1], deadline_s=30.0) as executor:
    for prompt in prompts_of() if sys.argv[2] == "compute" else ():
        request(executor, prompt, load="all", prefetch_s=5.0)
        executor.drain()
    print("done", flush=True)
    sys.stdin.read()
"""
# Mooncake's defaults write 500 values or 256 MB at a time, and hold a buffer of 1.25 GiB.
OFFLOAD = {
    "MOONCAKE_OFFLOAD_BUCKET_KEYS_LIMIT": "1",
    "MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS": "1",
    "MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES": str(64 << 20),
}


class Lender:
    """Machine A: a process that lends memory, and a folder if one is given."""

    def __init__(self, port, work="compute", disk=None):
        url = f"mooncake://127.0.0.1:{port}?segment_bytes={64 << 20}&strict=1"
        url += f"&disk={disk}" if disk else ""
        self._child = subprocess.Popen(
            [sys.executable, "-c", LENDER, url, work],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **OFFLOAD, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert self._child.stdout.readline() == "done\n"

    def kill(self):
        """End it as `kill -9` does."""
        self._child.send_signal(signal.SIGKILL)
        self._child.wait()
        self._child.stdin.close()
        self._child.stdout.close()


@pytest.fixture
def port(tmp_path):
    options = ("-client_ttl", "2", "-enable_offload", "-default_kv_lease_ttl", "100")
    sys.path.append(str(store_servers.SITE))
    with store_servers.mooncake(tmp_path / "master", *options) as server:
        yield server.port


@contextmanager
def lending(*arguments, **more):
    lender = Lender(*arguments, **more)
    try:
        yield lender
    finally:
        lender.kill()


@contextmanager
def borrower(port):
    """Machine B: an executor without a segment, with nothing in its memory."""
    with serving(f"mooncake://127.0.0.1:{port}", gpu=20, host=40) as executor:
        yield executor


def ask(executor):
    """Answer all prompts; tokens found, blocks read from A, late requests and wrong blocks."""
    counts, late = Counter(), []
    for prompt in PROMPTS:
        try:
            answer = request(executor, prompt, load="all")
        except WrongBlockError:
            counts["wrong"] += 1
            continue
        executor.manager.audit()
        counts["found"] += answer.hit
        late.append(answer.seconds - answer.computing - PREFETCH_S - DEADLINE_S)
    executor.drain()
    counts["read"] = executor.pools[2].stats().results.get(("get", "ok"), 0)
    counts["late"] = sum(seconds > SLACK_S for seconds in late)
    return counts


def places(executor):
    """The number of values by the kinds of memory that have them, by Mooncake's own account."""
    storage, keys = executor.pools[2], executor.manager.keys
    client = storage._store._open()._client
    names = {name.hex() for each in PROMPTS for name in storage._names(keys(each))}
    copies = Counter()
    for name in names:
        found = client.get_replica_desc(name)
        kinds = {"memory" if one.is_memory_replica() else "disk" for one in found}
        copies["+".join(sorted(kinds))] += 1
    return dict(copies)


ALL = {"found": len(PROMPTS) * TOKENS, "read": STORED, "late": 0}


def test_blocks_come_from_another_machines_memory_into_this_host(port):
    with lending(port), borrower(port) as b:
        assert places(b) == {"memory": STORED}
        prompt = PROMPTS[0]
        assert b.prefetch(prompt, deadline_s=30.0).found == BLOCKS
        b.drain()
        match = b.manager.lookup(prompt, now=b.clock(), keep=0)
        assert (match.resident("host"), match.resident("gpu")) == (BLOCKS, 0)
        assert ask(b) == ALL


def test_a_killed_machine_is_a_miss_in_time_until_it_is_back(port):
    with borrower(port) as b:
        with lending(port):
            pass
        counts = ask(b)
        assert (counts["read"], counts["late"], counts["wrong"]) == (0, 0, 0)
        results = b.pools[2].stats().results
        assert results["get", "missing"] > 0
        assert ("get", "unreachable") not in results  # the breaker stays closed for other machines
        store_servers.until(lambda: places(b) == {"": STORED})
        with lending(port):
            store_servers.until(lambda: again(b)["read"] >= STORED)
            assert (counts["late"], counts["wrong"]) == (0, 0)


def again(executor):
    """Answer all prompts by an executor that has forgotten its own blocks, but not its beliefs."""
    executor.drain()
    executor.manager.reset()
    return ask(executor)


def test_blocks_come_from_another_machines_disk_also_after_it_was_killed(port, tmp_path):
    disk = tmp_path / "disk"
    with lending(port, disk=disk) as a, borrower(port) as b:
        store_servers.until(lambda: places(b) == {"disk+memory": STORED})
        a.kill()
        counts = ask(b)
        assert (counts["read"], counts["late"], counts["wrong"]) == (0, 0, 0)
        store_servers.until(lambda: places(b) == {"": STORED})
    with lending(port, "wait", disk=disk), borrower(port) as b:
        store_servers.until(lambda: places(b) == {"disk": STORED})
        assert ask(b) == ALL
        storage, key = b.pools[2], bytes(b.manager.keys(PROMPTS[0])[0])
        layer = (storage.form.value_bytes - storage.form.header_bytes) // 4
        whole, part = (torch.zeros((layers, layer), dtype=torch.uint8) for layers in (4, 2))
        rows = [(key, 0, (0, 4), whole), (key, 0, (1, 3), part)]
        assert storage.read_many(rows) == [None, None]
        assert torch.equal(part, whole[1:3])
