"""A campaign of faults: processes that answer requests on one shared store while it fails.

Invariant: a fault is drawn from the seed; the interleaving of the processes is not.
"""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from contextlib import suppress
from multiprocessing.connection import wait
from typing import NamedTuple

from tests.remote_requests import (
    DEADLINE_S,
    PREFETCH_S,
    WrongBlockError,
    damage,
    prompts_of,
    request,
    serving,
)

from kvtrie import NoSpaceError

PROCESSES = 3
SLACK_S = 0.25  # of the machine's scheduler, per request
PROBES = 3
RECOVERED = 0.9
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
    with serving(url, gpu=20, host=10) as executor:
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
        self.after = Counter()
        self._last = ""
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
        self.wait_for_requests()

    def _count(self, kind):
        self.operations[kind] += 1
        if kind in {*self.store.faults, "recovery"}:
            self._last = kind

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
        self.wait_for_requests()
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
                if reply.late_s > SLACK_S:
                    self.after[self._last] += 1
        return replies

    def wait_for_requests(self):
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
        before, possible = 0, PROCESSES * sum(map(len, tokens))
        end = time.monotonic() + _PATIENCE_S
        # A store that answered late when a process opened it is probed a second later.
        while before < RECOVERED * possible and time.monotonic() < end:
            before, _ = self._read(tokens)
        self.store.fault(outage, self.rng)
        for _ in range(_OUTAGE_REQUESTS // len(tokens)):
            self._read(tokens)
        self.store.heal()
        best = probes = 0
        last, end = -_PATIENCE_S, time.monotonic() + _PATIENCE_S
        while probes < PROBES and best < RECOVERED * before and time.monotonic() < end:
            hits, reached = self._read(tokens)
            # A read that no call reached the store in is no probe: a breaker was open.
            if reached and time.monotonic() - last >= self.store.probe_s:
                probes, last = probes + 1, time.monotonic()
            best = max(best, hits)
        share = before / possible
        return {
            "outage": outage,
            "share before": share,
            "hits before": before,
            "hits after": best,
            "probes": probes,
        }

    def _read(self, prompts):
        """Each worker answers all prompts; tokens found, and whether all reached the store."""
        before, hits = [worker.calls for worker in self.workers], 0
        for tokens in prompts:
            for worker in self.workers:
                self._send(worker, Task(tokens, "all"))
            for worker, reply in self.wait_for_requests().items():
                hits, worker.calls = hits + reply.hit, reply.calls
        after = [worker.calls for worker in self.workers]
        return hits, all(map(int.__lt__, before, after))

    def close(self):
        for worker in self.workers:
            worker.kill()
