"""An engine over kvtrie's manager, which answers chats over HTTP and publishes its events.

    python -m examples.cluster.engine '{"port": 8100, "events": "tcp://127.0.0.1:5557", …}'

Requests are computed one after another, as a GPU does with prefills. Invariant: the KV of every
token that a request finds is compared with what its prefill gives; `wrong` counts those that
differ. It ends with its standard input. Cost: the time of the simulated model.
"""

# pyright: reportUnknownMemberType=false
# (torch leaves its functions untyped)

from __future__ import annotations

import contextlib
import json
import os
import queue
import sys
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from examples.cluster import model
from examples.cluster.engine_settings import EngineSettings
from examples.cluster.kv import prefill
from kvtrie import BlockManager, Cost, NoSpaceError, Tier, TransferError
from kvtrie.cluster import Publisher
from kvtrie.tiers import open_pools
from kvtrie.tiers.pool import Pool
from kvtrie.transfer import Executor

if TYPE_CHECKING:
    from kvtrie import Lease

LOAD_S = 2.0
"""Seconds that a load may take; then its block is computed."""

LOOKUP_S = 0.1
"""Seconds that a request waits for what the shared store has."""

_PUMP_S = 0.02
_EVENTS = 1 << 16


class Prefilled(NamedTuple):
    """A prompt whose KV is there.

    Attributes:
        found: tokens whose KV a cache had.
        computed: tokens that were computed.
        wrong: tokens that a cache had with KV of something else.
        busy_s: seconds in the queue and of computation, without those that loads took.
    """

    found: int
    computed: int
    wrong: int
    busy_s: float


@dataclass
class Job:
    """A request, and the queue on which its results come."""

    tokens: list[int]
    output: int
    arrived: float = field(default_factory=time.monotonic)
    results: queue.SimpleQueue[dict[str, Any]] = field(
        default_factory=queue.SimpleQueue[dict[str, Any]]
    )


class Engine:
    """The manager, its bytes and its publisher; one thread calls it."""

    def __init__(self, settings: EngineSettings) -> None:
        tiers = [
            Tier("gpu", blocks=settings.gpu, write="through"),
            Tier("host", blocks=settings.host, write="through"),
            Tier(
                "disk",
                blocks=settings.disk,
                path=settings.folder,
                write="through" if settings.store else "back",
                durability="none",
                io="buffered",
            ),
        ]
        if settings.store:
            tiers.append(Tier("remote", blocks=1_000_000, path=settings.store, trust_s=1.0))
        self._manager = BlockManager(
            model.SHAPE,
            tiers,
            block_tokens=model.SIZE,
            cost=Cost(ns_per_token=int(1e9 * model.PREFILL_S)),
            events=_EVENTS,
            events_of="residency",
        )
        pools = open_pools(model.SHAPE, tiers, model.SIZE)
        self._executor = Executor(self._manager, pools, deadline_s=LOAD_S)
        self._executor.restore()  # blocks on disk of the engine before, if there was one
        first = pools[0]
        assert isinstance(first, Pool)  # noqa: S101 - as open_pools makes it
        self._pool = first
        public = settings.address != "127.0.0.1"
        self._publisher = Publisher(
            self._manager, settings.events, replay=settings.replay, public=public
        )

    def run(self, jobs: queue.SimpleQueue[Job]) -> None:
        """Serve requests until the process ends."""
        while True:
            with contextlib.suppress(queue.Empty):
                self._serve(jobs.get(timeout=_PUMP_S))
            self._executor.poll()  # copies go on, and their events are published
            self._publisher.pump()

    def _serve(self, job: Job) -> None:
        queued = time.monotonic() - job.arrived
        for _ in range(2):
            try:
                done = self._prefill(job.tokens)
                break
            except (NoSpaceError, TransferError):  # moves still use the slots, or hang
                self._executor.drain()
        else:
            done = self._computed(job.tokens)
        decoding = job.output * model.DECODE_S
        done = done._replace(busy_s=queued + done.busy_s + decoding)
        job.results.put(done._asdict())
        time.sleep(decoding)
        job.results.put({"answer": model.answer(job.tokens, job.output)})

    @staticmethod
    def _computed(tokens: list[int]) -> Prefilled:
        """Compute all of a prompt, and keep nothing of it."""
        seconds = len(tokens) * model.PREFILL_S
        time.sleep(seconds)
        return Prefilled(0, len(tokens), 0, seconds)

    def _prefill(self, tokens: list[int]) -> Prefilled:
        self._executor.prefetch(tokens, deadline_s=LOOKUP_S)
        now = self._executor.clock()
        with self._manager.acquire(tokens, now=now) as lease:
            self._executor.wait(lease)
            began = time.monotonic()
            # A load that failed has shortened the match, so room for what follows it is missing.
            lease.reserve(len(tokens) - lease.matched, now=self._executor.clock())
            right = prefill(tokens)
            cached = torch.arange(len(tokens)) < lease.matched
            cached[torch.as_tensor(lease.plan.recompute().astype(int))] = False
            wrong = self._compute(lease, cached, right)
            lease.commit(tokens[lease.matched :], now=self._executor.clock())
        found = int(cached.sum())
        return Prefilled(found, len(tokens) - found, wrong, time.monotonic() - began)

    def _compute(self, lease: Lease, cached: torch.Tensor, right: torch.Tensor) -> int:
        """Compare the tokens that are there and compute the others; the number of wrong ones.

        The KV of a last block that is not full is not kept, so its bytes do not matter.
        """
        time.sleep((len(cached) - int(cached.sum())) * model.PREFILL_S)
        whole = right.shape[2]
        at, held = torch.arange(whole), cached[:whole]
        wrong = torch.zeros(whole, dtype=torch.bool)
        for layer, slots in enumerate(self._pool.table(lease.slots(0))):
            where = (slots[at // model.SIZE], at % model.SIZE)
            for part, want in zip(self._pool.gather(*where), right[layer], strict=True):
                wrong |= held & (part != want).flatten(1).any(dim=1)
            self._pool.scatter(*(part[~held] for part in where), *right[layer][:, ~held])
        return int(wrong.sum())


class _Handler(BaseHTTPRequestHandler):
    """`POST /generate` with tokens and a number of answer tokens; one line of JSON per result."""

    jobs: queue.SimpleQueue[Job]

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        job = Job(asked["tokens"], asked["output"])
        self.jobs.put(job)
        self.send_response(200)
        self.end_headers()
        for _ in range(2):
            self.wfile.write(json.dumps(job.results.get()).encode() + b"\n")
            self.wfile.flush()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - as http.server names it
        """Log nothing."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
        """Ignore clients that gave up."""


def _end_with_input() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


def main() -> None:
    """Serve until standard input ends."""
    settings = EngineSettings(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    engine = Engine(settings)
    jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
    handler = type("Handler", (_Handler,), {"jobs": jobs})
    server = _Server((settings.address, settings.port), handler)
    for target in (server.serve_forever, _end_with_input):
        threading.Thread(target=target, daemon=True).start()
    print("ready", flush=True)
    engine.run(jobs)


if __name__ == "__main__":
    main()
