"""Requests sent to a server at their times, and what came back.

Invariant: a request is sent at its time, however late answers are. Cost: a thread per open request.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import fmean
from threading import Event
from time import monotonic, monotonic_ns, sleep
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from benches.eval_times.server import Served
    from kvtrie.sim.completions import Answer

__all__ = ["Played", "play"]

OPEN, EVERY_S = 256, 1.0
WAITING = "vllm:num_requests_waiting"
FOUND = {
    "gpu": "vllm:prefix_cache_hits_total",
    "host": "vllm:kvtrie_found_tokens_total host",
    "disk": "vllm:kvtrie_found_tokens_total disk",
}


@dataclass(frozen=True, slots=True)
class Played:
    """What a server did with a trace.

    Attributes:
        requests: of each request seconds from the begin to when it was sent, to its first token and
            to its last one, and its tokens.
        found: tokens of prompts that were found, by tier.
        queue: mean number of requests that waited.
    """

    requests: list[tuple[float, float, float, int]]
    found: dict[str, int]
    queue: float


def play(served: Served, trace: Path) -> Played:
    """Send the requests of a trace of tokens."""
    rows = [json.loads(line) for line in trace.read_text().splitlines()]
    before = served.metrics()
    ended, waiting = Event(), list[float]()

    def watch() -> None:
        while not ended.wait(EVERY_S):
            waiting.append(served.metrics()[WAITING])

    begin = monotonic_ns()

    def asked() -> Iterator[Answer]:
        with ThreadPoolExecutor(OPEN) as threads:
            watcher = threads.submit(watch)
            coming = []
            for row in rows:
                sleep(max(0.0, (begin + row["arrival_ns"]) / 1e9 - monotonic()))
                coming.append(
                    threads.submit(served.server.answer, row["tokens"], row["output_tokens"])
                )
            yield from [future.result() for future in coming]
            ended.set()
            watcher.result()

    answers = list(asked())
    after = served.metrics()
    found = {tier: round(after.get(name, 0) - before.get(name, 0)) for tier, name in FOUND.items()}
    seconds = [
        tuple((at - begin) / 1e9 for at in (answer.sent, answer.parts[0], answer.parts[-1]))
        for answer in answers
    ]
    return Played(
        [
            (sent, first, last, answer.tokens)
            for (sent, first, last), answer in zip(seconds, answers, strict=True)
        ],
        found,
        fmean(waiting),
    )
