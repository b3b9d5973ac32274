"""Dynamo's indexer and selection service, started by tests, and engines that publish to them.

`main` runs in a network namespace: both services listen on every address without authentication.
"""

from __future__ import annotations

import subprocess
import time
import urllib.request
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import msgspec
import zmq

from kvtrie.cluster import DynamoIndex, DynamoSelector, Held

PYTHON = Path(__file__).parents[2] / "benches" / "peers" / "envs" / "dynamo" / "bin" / "python"
POLLS = 20_000
TOKENS = list(range(100))
SIZE = 16
PORTS = count(10_000)  # those that the system gives to connections are higher


class Dynamo:
    """A process of Dynamo, `indexer` or `select_service`."""

    def __init__(self, module):
        self._module, self.port = module, next(PORTS)
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self):
        command = [PYTHON, "-m", f"dynamo.{self._module}", "--port", str(self.port)]
        null = subprocess.DEVNULL
        self.process = subprocess.Popen(command, stdout=null, stderr=null)
        while self.process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=1):  # noqa: S310
                    return
            except OSError:
                continue
        raise AssertionError(f"{self._module} ended with {self.process.returncode}")

    def close(self):
        self.process.kill()
        self.process.wait()


class Engine:
    """An engine that publishes that it has blocks of `TOKENS`, in vLLM's form."""

    def __init__(self, context, machine):
        self.machine = machine
        self._sock = context.socket(zmq.PUB)
        port = self._sock.bind_to_random_port("tcp://127.0.0.1")
        self.events = f"tcp://127.0.0.1:{port}"
        self._number = 0

    def stored(self, blocks, medium):
        """Publish blocks from the first on; again and again, as a subscriber may come late."""
        hashes = [1000 * self.machine + at for at in range(blocks)]
        event = ["BlockStored", hashes, None, TOKENS[: blocks * SIZE], SIZE, None, medium]
        self._number += 1
        batch = msgspec.msgpack.encode([time.time(), [event], 0])
        self._sock.send_multipart([b"", self._number.to_bytes(8, "big"), batch])


@contextmanager
def closed(*opened):
    try:
        yield opened
    finally:
        for one in opened:
            one.close()


def until(done, publish):
    """Publish until the service has read it."""
    for _ in range(POLLS):
        if done():
            return
        publish()
    raise AssertionError("the service has not read the events")


def index_follows_its_machines(engines):
    with closed(Dynamo("indexer")) as (service,), closed(DynamoIndex(service.url)) as (index,):
        for engine in engines:
            index.add(engine.machine, events=engine.events)

        def publish():
            engines[1].stored(2, "GPU")
            engines[1].stored(5, "CPU")
            engines[2].stored(3, "STORAGE")

        def match():
            return index.match(TOKENS, deadline_s=5)

        held = {1: Held(2, 5, 5), 2: Held(0, 0, 3)}
        until(lambda: match() == held, publish)
        index.remove(1)
        assert match() == {2: held[2]}
        index.add(1, events=engines[1].events)
        until(lambda: match() == held, publish)
        service.close()
        assert match() == {}
        service.start()
        until(lambda: match() == held, publish)
        assert index.stats().calls.keys() <= {"ok", "unreachable", "open"}


def selector_sends_requests_to_their_blocks(engines):
    with (
        closed(Dynamo("select_service")) as (service,),
        closed(DynamoSelector(service.url, deadline_s=5)) as (selector,),
    ):
        for engine in engines:
            selector.add(engine.machine, events=engine.events)
        ids = iter(range(10 * POLLS))

        def pick(*, failed=False):
            name = str(next(ids))
            machine = selector.pick(name, TOKENS, expected_output=10)
            selector.prefilled(name)
            selector.done(name, failed=failed)
            return machine

        until(lambda: [pick() for _ in range(3)] == [2, 2, 2], lambda: engines[2].stored(6, "GPU"))
        assert pick(failed=True) == 2
        assert 2 not in {pick() for _ in range(3)}
        selector.remove(2)
        assert 2 not in {pick() for _ in range(3)}
        selector.add(2, events=engines[2].events)
        until(lambda: [pick() for _ in range(3)] == [2, 2, 2], lambda: engines[2].stored(6, "GPU"))
        # Load counts too: requests that have not ended move the choice away from the hits.
        chosen = [selector.pick(f"open {at}", TOKENS) for at in range(100)]
        assert chosen[:10] == [2] * 10
        assert set(chosen) == {0, 1, 2}, chosen
        for at in range(100):
            selector.done(f"open {at}")
        service.close()
        assert [pick() for _ in range(4)] == [0, 0, 0, 0]
        service.start()
        until(lambda: [pick() for _ in range(3)] == [2, 2, 2], lambda: engines[2].stored(6, "GPU"))
        stats = selector.stats()
        assert stats.picks.keys() <= {"selected", "unreachable", "open"}
        assert stats.requests == {0: 0, 1: 0, 2: 0}
        with urllib.request.urlopen(f"{service.url}/loads", timeout=5) as answer:  # noqa: S310
            loads = msgspec.json.decode(answer.read())
        assert [row["active_requests"] for row in loads[0]["loads"]] == [0, 0, 0]


def main():
    with zmq.Context() as context:
        context.setsockopt(zmq.LINGER, 0)
        engines = [Engine(context, machine) for machine in range(3)]
        try:
            index_follows_its_machines(engines)
            selector_sends_requests_to_their_blocks(engines)
        finally:
            context.destroy()
