"""Random faults of a shared store under executors: no wrong block, no request past its deadline.

Each step is a request, or a fault of the store or of a value. Every byte that a request finds is
compared with what a prefill gives. `make faults-remote` plays thousands of steps on real servers.
"""

from __future__ import annotations

import random
from contextlib import contextmanager

import pytest
from respserver import RespServer
from tests.remote_requests import (
    BLOCKS,
    FolderValues,
    close,
    damage,
    executor_of,
    prompts_of,
    request,
)

from kvtrie import NoSpaceError

OPS = 120


class Folder(FolderValues):
    """Values in files."""

    def __init__(self, folder):
        super().__init__(folder)
        self.url = f"folder:{folder}"

    def fault(self, rng):
        """A stale staging file of an ended writer, or a foreign file."""
        place = self.folder / rng.choice(["staging", "00"])
        place.mkdir(exist_ok=True, parents=True)
        (place / f"{rng.random()}").write_bytes(b"foreign")

    def heal(self):
        pass


class Server:
    """Values in a RESP server that stalls, cuts, refuses and goes away."""

    def __init__(self, server):
        self.server, self.url = server, f"redis://127.0.0.1:{server.port}/0?connect_s=0.2"
        self.port = server.port

    def names(self):
        return sorted(self.server.values)

    def get(self, name):
        return self.server.values[name]

    def set(self, name, value):
        self.server.values[name] = value

    def remove(self, name):
        self.server.values.pop(name, None)

    def fault(self, rng):
        """The server goes away, cuts values, stalls in a value, is full, or sends nonsense."""
        kind = rng.choice(["stop", "cut", "stall", "full", "nonsense"])
        if kind == "stop":
            self.server.stop()
        elif kind == "cut":
            self.server.cut = rng.randrange(100, 9000)
        elif kind == "stall":
            self.server.released.clear()
            self.server.stalled.set()
        elif kind == "full":
            self.server.error = b"-OOM command not allowed\r\n"
        else:
            self.server.error = b"$12\r\nnot a value!\r\n"

    def heal(self):
        server = self.server
        server.cut = server.error = None
        server.stalled.clear()
        server.released.set()
        if server._server is None:
            server.start(self.port)


@contextmanager
def store_of(kind, folder):
    if kind == "folder":
        yield Folder(folder)
    else:
        pytest.importorskip("redis")
        with RespServer() as server:
            yield Server(server)


@pytest.mark.parametrize("kind", ["folder", "redis"])
def test_random_faults_give_no_wrong_block_and_every_request_ends(kind, tmp_path):
    rng = random.Random(f"{kind} 1")
    prompts = prompts_of()
    found = computed = 0
    with store_of(kind, tmp_path / "kv") as store:
        # Two processes that share the store, write the same names and come and go.
        executors = [executor_of(store.url), executor_of(store.url)]
        try:
            for _ in range(OPS):
                choice = rng.random()
                if choice < 0.70:
                    tokens = rng.choice(prompts)
                    try:
                        answer = request(rng.choice(executors), tokens)
                    except NoSpaceError:  # its slots are quarantined while the store stalls
                        continue
                    found, computed = found + answer.hit, computed + len(tokens) - answer.hit
                elif choice < 0.88:
                    damage(store, rng)
                elif choice < 0.93:
                    store.fault(rng)
                elif choice < 0.97:
                    store.heal()
                else:
                    at = rng.randrange(2)
                    close(executors[at])
                    store.heal()
                    executors[at] = executor_of(store.url)
                for executor in executors:
                    executor.manager.audit()
            store.heal()
            recover(store, executors, prompts)
        finally:
            store.heal()
            for executor in executors:
                close(executor)
    assert found
    assert computed


def recover(store, executors, prompts):
    """After the store has recovered, all blocks are found again.

    A round refutes and removes the first damaged value of a prompt, and writes it again.
    """
    prompts = prompts[:4]
    for _ in range(BLOCKS + 1):
        for executor in executors:
            close(executor)
        executors[:] = [executor_of(store.url, 30.0)]
        (reader,) = executors
        hits = 0
        for tokens in prompts:
            hits += request(reader, tokens, load="all", prefetch_s=60.0).hit
            reader.drain()
        if hits == sum(map(len, prompts)):
            break
    assert hits == sum(map(len, prompts))
    assert reader.pools[2].stats().results["get", "ok"] > 0
