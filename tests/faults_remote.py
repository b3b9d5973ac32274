"""Shared stores that fail under three processes: wrong blocks, late requests, hits after recovery.

`python -m tests.faults_remote [STORE …] --ops 2000 --seed 1 --json PATH`. Three processes answer
requests on one store at once and compare every byte, while this one kills, stops, fills and slows
the store, damages values, and kills the processes. Exit status 1 if a goal is missed.
Invariant: a fault is drawn from the seed; the interleaving of the processes is not.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple

from tests import store_servers
from tests.remote_requests import (
    DEADLINE_S,
    PREFETCH_S,
    FolderValues,
    WrongBlockError,
    damage,
    executor_of,
    prompts_of,
    request,
)
from tests.tcp_proxy import TcpProxy

from kvtrie import NoSpaceError

PROCESSES = 3
SLACK_S = 0.25  # of the machine's scheduler, per request
PROBES = 3
RECOVERED = 0.9
FULL_BYTES = 1 << 20
_PATIENCE_S = 90.0
_OUTAGE_REQUESTS = 24


class Task(NamedTuple):
    """A request for a worker.

    Attributes:
        tokens: the prompt.
        load: as of `BlockManager.acquire`.
    """

    tokens: list[int]
    load: str = "plan"


class Reply(NamedTuple):
    """The end of a worker's request.

    Attributes:
        hit: tokens found in a cache.
        late_s: seconds after its deadline plus the time to compute all of it; negative in time.
        error: "" or "wrong", "no space", or what was raised.
        calls: blocks of all calls that reached the store.
    """

    hit: int
    late_s: float
    error: str
    calls: int


def serve(url, channel):
    """Answer tasks until the channel closes, with an audit after each."""
    logging.disable(logging.WARNING)
    with executor_of(url, gpu=20, host=10) as executor:
        store = executor.pools[2]
        channel.send("ready")
        while True:
            try:
                task = channel.recv()
            except EOFError:
                return
            hit, late, error = 0, 0.0, ""
            try:
                answer = request(executor, task.tokens, load=task.load)
                late = answer.seconds - answer.computing - PREFETCH_S - DEADLINE_S
                hit = answer.hit
                executor.manager.audit()
            except WrongBlockError:
                error = "wrong"
            except NoSpaceError:
                error = "no space"
            except Exception as failure:  # noqa: BLE001 - the report names it
                error = f"{type(failure).__name__}: {failure}"
            results = store.stats().results
            calls = sum(
                count for (_, outcome), count in results.items() if outcome != "unreachable"
            )
            channel.send(Reply(hit, late, error, calls))


class Worker:
    """A process with an executor on the store."""

    def __init__(self, context, url):
        self.channel, other = context.Pipe()
        self.process = context.Process(target=serve, args=(url, other), daemon=True)
        self.process.start()
        other.close()
        self.busy = False
        self.calls = 0
        self.channel.recv()

    def ask(self, task):
        self.channel.send(task)
        self.busy = True

    def reply(self):
        self.busy = False
        return self.channel.recv()

    def kill(self):
        """End it as `kill -9` does."""
        self.process.kill()
        self.process.join()
        self.channel.close()


class FolderStore(FolderValues):
    """A folder that is lost, fills up, and loses files."""

    faults = ("gone", "full", "evict", "foreign")
    outages = ("gone",)
    may_be_away = False  # when a process starts: that is an error of its settings
    lost = OSError

    def __init__(self, folder):
        super().__init__(folder)
        self.url = f"folder:{folder}"
        self._away = self.folder.with_name("away")
        self._room = self.folder / "room"

    def fault(self, kind, rng):
        """The mount is gone, there is no room left, another client removes or adds files."""
        if kind == "gone" and not self._away.exists():
            self.folder.rename(self._away)
            self.folder.touch()
        elif kind == "full" and self.folder.is_dir():
            with suppress(OSError), self._room.open("wb") as file:
                while file.write(bytes(1 << 20)):
                    file.flush()
        elif kind == "evict":
            for name in self.names():
                if rng.random() < 0.5:
                    self.remove(name)
        elif kind == "foreign" and self.folder.is_dir():
            for place in ("staging", "00"):
                with suppress(OSError):  # there may be no room
                    (self.folder / place).mkdir(exist_ok=True)
                    (self.folder / place / f"{rng.random()}").write_bytes(b"foreign")

    def heal(self):
        if self._away.exists():
            self.folder.unlink()
            self._away.rename(self.folder)
        self._room.unlink(missing_ok=True)


class ServerStore:
    """A server after a proxy that is killed, stopped, cut off and slowed down."""

    outages = ("pause", "stall", "kill")
    may_be_away = True
    lost: type[Exception] = OSError

    def __init__(self, server, proxy):
        self.server, self.proxy = server, proxy
        self._paused = False

    @property
    def _reachable(self):
        return self.server.process is not None and not self._paused

    def fault(self, kind, rng):
        """A fault of the server or of the network."""
        if kind == "kill":
            self.server.kill()
            self._paused = False
        elif kind == "pause" and self.server.process is not None:
            self.server.pause()
            self._paused = True
        elif kind == "cut":
            self.proxy.cut = rng.randrange(100, 9000)
        elif kind == "delay":
            self.proxy.delay = rng.choice([0.01, 0.1, 0.4])
        elif kind == "stall":
            self.proxy.stall()
        elif kind == "drop":
            self.proxy.drop()

    def heal(self):
        self.proxy.release()
        if self._paused:
            self.server.resume()
            self._paused = False
        if self.server.process is None:
            self.server.start()


class RedisServer(ServerStore):
    """A Redis or Valkey server; it loses its values when it is killed."""

    faults = ("kill", "pause", "cut", "delay", "stall", "drop", "full", "evict")

    def __init__(self, server, proxy):
        import redis  # an extra

        super().__init__(server, proxy)
        self.url = f"redis://127.0.0.1:{proxy.port}/0?connect_s=0.2"
        self._client = redis.Redis(
            port=server.port, socket_timeout=0.2, socket_connect_timeout=0.2, retry=None
        )
        self.lost = redis.RedisError

    def names(self):
        return sorted(self._client.keys()) if self._reachable else []

    def get(self, name):
        return self._client.get(name) or b""

    def set(self, name, value):
        self._client.set(name, value)

    def remove(self, name):
        self._client.delete(name)

    def fault(self, kind, rng):
        """A fault of the server, of its memory, or of the network."""
        super().fault(kind, rng)
        if kind in {"full", "evict"} and self._reachable:
            policy = "noeviction" if kind == "full" else "allkeys-random"
            self._client.config_set("maxmemory-policy", policy)
            self._client.config_set("maxmemory", FULL_BYTES)

    def heal(self):
        super().heal()
        for _ in range(10):  # one that was stopped may still have commands to answer
            with suppress(self.lost):
                self._client.config_set("maxmemory", 0)
                return
        raise RuntimeError("the server does not answer after it was healed")


class S3Server(ServerStore):
    """A server of S3's protocol, which keeps its objects when it is killed."""

    faults = ("kill", "pause", "cut", "delay", "stall", "drop", "evict")

    def __init__(self, server, proxy):
        import obstore  # an extra
        from obstore.store import S3Store

        super().__init__(server, proxy)
        bucket, endpoint = store_servers.make_bucket(server), "http://127.0.0.1"
        plain = {"region": "us-east-1", "client_options": {"allow_http": True, "timeout": "2s"}}
        self._client = S3Store(bucket, endpoint=f"{endpoint}:{server.port}", **plain)
        self._obstore, self.lost = obstore, obstore.exceptions.BaseError
        self.url = (
            f"s3://{bucket}/kv?region=us-east-1&connect_s=0.2&endpoint={endpoint}:{proxy.port}"
        )

    def names(self):
        if not self._reachable:
            return []
        return sorted(row["path"] for part in self._obstore.list(self._client) for row in part)

    def get(self, name):
        return bytes(self._obstore.get(self._client, name).bytes())

    def set(self, name, value):
        self._obstore.put(self._client, name, value)

    def remove(self, name):
        self._obstore.delete(self._client, name)

    def fault(self, kind, rng):
        """A fault of the server or network, or another client removes half of the objects."""
        super().fault(kind, rng)
        for name in self.names() if kind == "evict" else ():
            if rng.random() < 0.5:
                self.remove(name)


@contextmanager
def folder_store(folder):
    """A folder on a small file system, where this user may mount one."""
    root = folder / "mount"
    root.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "kvtrie-test", str(root)]
    mounted = not subprocess.run(command, check=False, capture_output=True).returncode
    try:
        store = FolderStore(root / "kv")
        if not mounted:
            store.faults = tuple(kind for kind in store.faults if kind != "full")
        yield store
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(root)], check=True)  # noqa: S607 - as above


@contextmanager
def server_store(folder, start=store_servers.valkey):
    with start(folder) as server, TcpProxy(server.port) as proxy:
        yield RedisServer(server, proxy)


@contextmanager
def s3_store(folder):
    os.environ["AWS_ACCESS_KEY_ID"] = store_servers.ACCESS
    os.environ["AWS_SECRET_ACCESS_KEY"] = store_servers.SECRET
    with store_servers.seaweedfs(folder) as server, TcpProxy(server.port) as proxy:
        yield S3Server(server, proxy)


STORES = {
    "folder": folder_store,
    "valkey": server_store,
    "redis": lambda folder: server_store(folder, store_servers.redis),
    "seaweedfs": s3_store,
}


class Campaign:
    """Random operations of three processes on one store, and what came of them."""

    def __init__(self, store, context, seed):
        self.store, self.rng = store, random.Random(seed)
        self._context, self._url = context, store.url
        self.workers = [self._worker() for _ in range(PROCESSES)]
        self.prompts = prompts_of()
        self.operations, self.errors = Counter(), Counter()
        self.hits = self.tokens = 0
        self.late = []
        self._fresh = 0

    def _worker(self):
        return Worker(self._context, self._url)

    def play(self, wanted):
        """Play operations, most of them requests; faults come while requests run."""
        while sum(self.operations.values()) < wanted:
            choice = self.rng.random()
            if choice < 0.74:
                self._ask(self.rng.choice(self.prompts))
                self._count("request")
            elif choice < 0.77:
                self._race()
                self._count("two writers of one name")
            elif choice < 0.89:
                self._damage()
            elif choice < 0.925:
                kind = self.rng.choice(self.store.faults)
                with suppress(self.store.lost):  # it answers nothing after another fault
                    self.store.fault(kind, self.rng)
                self._count(kind)
            elif choice < 0.985:
                self.store.heal()
                self._count("recovery")
            else:
                self._replace(self.rng.randrange(PROCESSES))
                self._count("kill of a process")
        self.settle()

    def _count(self, kind):
        self.operations[kind] += 1

    def _damage(self):
        # The store may be gone, or answer nothing.
        with suppress(OSError, self.store.lost):
            kind = damage(self.store, self.rng)
            if kind:
                self._count(kind)

    def _race(self):
        """Two processes compute and write the same new prompt at once."""
        self._fresh += 1
        tokens = [1_000_000 + self._fresh * 100 + at for at in range(24)]
        self.settle()
        for worker in self.rng.sample(self.workers, 2):
            self._send(worker, Task(tokens))

    def _replace(self, at):
        self.workers[at].kill()
        if not self.store.may_be_away:
            self.store.heal()
        self.workers[at] = self._worker()

    def _ask(self, tokens):
        idle = [worker for worker in self.workers if not worker.busy]
        if not idle:
            self._receive(_PATIENCE_S)
            idle = [worker for worker in self.workers if not worker.busy]
        self._send(self.rng.choice(idle), Task(tokens))

    def _send(self, worker, task):
        worker.ask(task)
        self.tokens += len(task.tokens)

    def _receive(self, timeout):
        """The replies that have come; at least one."""
        channels = {worker.channel: worker for worker in self.workers if worker.busy}
        ready = wait(channels, timeout)
        if not ready:
            raise RuntimeError(f"no request ended in {timeout:.0f} s")
        replies = {}
        for channel in ready:
            worker = channels[channel]
            try:
                reply = worker.reply()
            except (EOFError, ConnectionError):
                self.errors["a process ended by itself"] += 1
                self._replace(self.workers.index(worker))
                continue
            replies[worker] = reply
            self.hits += reply.hit
            if reply.error:
                self.errors[reply.error] += 1
            else:
                self.late.append(reply.late_s)
        return replies

    def settle(self):
        """Wait for all requests; the last reply of each worker."""
        replies = {}
        while any(worker.busy for worker in self.workers):
            replies |= self._receive(_PATIENCE_S)
        return replies

    def recover(self, outage):
        """The share of hits that is there again at most three probes after an outage."""
        self.store.heal()
        for at in range(PROCESSES):
            self._replace(at)
        tokens = [
            [2_000_000 + 1000 * self._fresh + 100 * seed + at for at in range(24)]
            for seed in range(8)
        ]
        self._fresh += 1
        for _ in range(2):
            self._read(tokens)
        before, _ = self._read(tokens)
        self.store.fault(outage, self.rng)
        for _ in range(_OUTAGE_REQUESTS // len(tokens)):
            self._read(tokens)
        self.store.heal()
        best = probes = 0
        end = time.monotonic() + _PATIENCE_S
        while probes < PROBES and best < RECOVERED * before and time.monotonic() < end:
            hits, reached = self._read(tokens)
            # A read that no call reached the store in is no probe: a breaker was open.
            probes += reached
            best = max(best, hits)
        return {"outage": outage, "hits before": before, "hits after": best, "probes": probes}

    def _read(self, prompts):
        """Each worker answers all prompts; tokens found, and whether all reached the store."""
        before, hits = [worker.calls for worker in self.workers], 0
        for tokens in prompts:
            for worker in self.workers:
                self._send(worker, Task(tokens, "all"))
            for worker, reply in self.settle().items():
                hits, worker.calls = hits + reply.hit, reply.calls
        after = [worker.calls for worker in self.workers]
        return hits, all(map(int.__lt__, before, after))

    def close(self):
        for worker in self.workers:
            worker.kill()


def measure(name, wanted, seed, context):
    """The figures of one store."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        store = stack.enter_context(STORES[name](folder))
        began = time.monotonic()
        campaign = Campaign(store, context, f"{name} {seed}")
        stack.callback(campaign.close)
        stack.callback(store.heal)
        campaign.play(wanted)
        recoveries = [campaign.recover(outage) for outage in store.outages]
        late = sorted(campaign.late)
        return {
            "store": name,
            "operations": sum(campaign.operations.values()),
            "by kind": dict(campaign.operations.most_common()),
            "wrong": campaign.errors.pop("wrong", 0),
            "without room": campaign.errors.pop("no space", 0),
            "errors": dict(campaign.errors),
            "requests": len(late),
            "share found": campaign.hits / campaign.tokens,
            "late": sum(seconds > SLACK_S for seconds in late),
            "latest_s": late[-1],
            "recovery": recoveries,
            "seconds": time.monotonic() - began,
        }


def misses(figures):
    """The goals that one store's figures miss."""
    found = [f"{figures['wrong']} wrong blocks"] * bool(figures["wrong"])
    found += [f"{error}: {count}" for error, count in figures["errors"].items()]
    if figures["late"]:
        found.append(f"{figures['late']} late requests, the latest by {figures['latest_s']:.2f} s")
    found += [
        f"{one['hits after']} of {one['hits before']} hits after {one['outage']}"
        for one in figures["recovery"]
        if one["hits after"] < RECOVERED * one["hits before"] or not one["hits before"]
    ]
    return found


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("stores", nargs="*", metavar="STORE", help=", ".join(STORES))
    parser.add_argument("--ops", type=int, default=2000, help="operations per store")
    parser.add_argument("--seed", default="1")
    parser.add_argument("--json", type=Path, help="write the figures")
    given = parser.parse_args(arguments)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.remote_requests"])
    logging.disable(logging.WARNING)
    results, missed = [], False
    for name in given.stores or STORES:
        if not store_servers.PROGRAMS.get(name, Path()).exists():
            sys.stdout.write(f"{name}: not run, no server: make stores\n")
            continue
        figures = measure(name, given.ops, given.seed, context)
        results.append(figures)
        sys.stdout.write(json.dumps(figures, indent=1) + "\n")
        for goal in misses(figures):
            missed = True
            sys.stdout.write(f"{name}: {goal}\n")
        sys.stdout.flush()
    if given.json:
        given.json.write_text(json.dumps(results, indent=1) + "\n")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
