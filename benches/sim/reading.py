"""How fast traces are read, by form: requests per second; and benches/results/sim_reading.json.

    make bench-sim-reading

A million requests with the mean sizes of Mooncake's conversation trace, 24 hashes in 2.8 ranges,
are written in the compact form, a fifth of these in each other form, and read as `kvtrie sim` reads
them. Processor time counts, so other
processes of the machine do not. Memory is what the process holds at most in addition to what it
held before.
Cost: a minute, and 200 MB of disk for a while.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime, timedelta
from multiprocessing import get_context
from pathlib import Path
from random import Random
from time import process_time
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.progress import track

from benches.core.place import place
from benches.core.referee import ROOT
from benches.record import Result, document, keep, options, show
from kvtrie.sim.config.trace import TraceSource
from kvtrie.sim.requests import trace_requests
from kvtrie.sim.trace import TraceRequest, write_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

OUT = ROOT / "benches/results/sim_reading.json"
REQUESTS = 1_000_000
OTHERS = 200_000  # of each other form
GOAL = 200_000
TOKENS = 512
BASE_NS = 1_753_780_607_550_317_897
BEGUN = datetime(2026, 9, 24, 10, tzinfo=UTC)
_MASK = 2**64 - 1


def made(requests: int) -> Iterator[TraceRequest]:
    """Turns of conversations that are open at a time: what was said before, and new hashes."""
    rng = Random(1)
    opened: list[list[int]] = [[] for _ in range(64)]
    fresh = 1
    for number in range(requests):
        chat = rng.randrange(len(opened))
        if rng.random() < 0.56 or not opened[chat]:
            opened[chat] = [0]
        new = 1 + rng.randrange(25)
        opened[chat] = [*opened[chat], *range(fresh, fresh + new)]
        fresh += new
        blocks = np.array(opened[chat], dtype=np.uint32)
        yield TraceRequest(number * 1_000_000, len(blocks) * TOKENS - 9, 100, blocks, f"{chat}")


def wide(hashed: int) -> int:
    """A hash of 64 bits for an id."""
    return (hashed * 0x9E3779B97F4A7C15 + 0x1F83D9ABFB41BD6B) & _MASK


def lines(path: Path, of: Callable[[TraceRequest], dict[str, Any]], requests: int) -> None:
    """Write a form of the trace."""
    with path.open("w") as file:
        for one in made(requests):
            row = {"input_length": one.input_tokens, "output_length": one.output_tokens}
            file.write(json.dumps({**row, **of(one)}) + "\n")


FORMS: dict[str, Callable[[TraceRequest], dict[str, Any]]] = {
    "Mooncake's lines": lambda one: {
        "timestamp": one.at // 1_000_000,
        "hash_ids": one.blocks.tolist(),
    },
    "hashes of 64 bits, times as text": lambda one: {
        "timestamp": str(BASE_NS + one.at),
        "hash_ids": [wide(each) for each in one.blocks.tolist()],
    },
    "hashes as text, dates": lambda one: {
        "timestamp": (BEGUN + timedelta(milliseconds=one.at // 1_000_000)).isoformat(),
        "hash_ids": [f"{wide(each):016x}" for each in one.blocks.tolist()],
    },
}


def read(path: Path) -> tuple[int, int, float, float]:
    """Requests, hashes, processor seconds and MB of memory in addition."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begun, requests, hashes = process_time(), 0, 0
    for row in trace_requests(TraceSource(path, "mooncake", hash_tokens=TOKENS), TOKENS):
        requests += 1
        hashes += len(row[1])
    seconds = process_time() - begun
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return requests, hashes, seconds, (after - before) / 1024


def row_of(what: str, path: Path, goal: int | None) -> Result:
    """The speed of a form, in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
        requests, hashes, seconds, grown = fresh.submit(read, path).result()
    speed = round(requests / seconds)
    more = {
        "requests": requests,
        "hashes": round(hashes / requests, 2),
        "line_bytes": round(path.stat().st_size / requests),
        "memory_mb": round(grown, 1),
    }
    ok = None if goal is None else speed >= goal
    return Result(what, speed, "requests/s", goal=goal, ok=ok, more=more)


def main() -> int:
    """Write, read, report, record."""
    given = options(__doc__, OUT).parse_args()
    requests, others = (2000, 2000) if given.quick else (REQUESTS, OTHERS)
    rows: list[Result] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace"
        for what in track(["compact", *FORMS], "Reading", disable=given.json):
            if what == "compact":
                write_trace(path, made(requests))
            else:
                lines(path, FORMS[what], others)
            rows.append(row_of(what, path, GOAL if what == "compact" else None))
    if not keep(given, document(place(), rows)):
        show(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
