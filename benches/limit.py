"""A hundred lines without the contract: what the machine allows, to compare our figures with.

Plays a prototype that is not part of the project. KVTRIE_PROTOTYPE names the folder with its
module `proto`: `Manager(blocks)` with `lookup`, `acquire`, `commit` and `release` on one LRU tier.
The lines are those of ours, by the name `limit`. Cost: that of ours.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections import deque
from time import perf_counter
from typing import Any

import numpy as np

from benches.measure import Clock, emit, percentile, resident_bytes
from benches.workload import BLOCK, LRU_POOL, RUNNING, SEED, VOCABULARY, Trace

PEER = "limit"
PARTS = ("acquire", "commit_prompt", "commit_answer", "release")
LEAVES = 50_000
CHAINS = 1000


def bench_request(proto: Any) -> None:
    """The common trace without lookups, then with a cold one before each request."""
    trace, clock, times = Trace(SEED), Clock(*PARTS), []
    gc.freeze()
    for asking in (False, True):
        manager = proto.Manager(LRU_POOL)
        running: deque[int] = deque()
        parts = Clock(*PARTS).samples if asking else clock.samples
        for _, prompt, signed in trace:
            tokens = signed.view(np.uint32)
            question = tokens[:prompt]
            if asking:
                t = perf_counter()
                manager.lookup(question)
                times.append(1e6 * (perf_counter() - t))
            t = perf_counter()
            hold, done = manager.acquire(question)
            parts["acquire"].append(perf_counter() - t)
            t = perf_counter()
            hold = manager.commit(hold, done, question)
            parts["commit_prompt"].append(perf_counter() - t)
            t = perf_counter()
            hold = manager.commit(hold, prompt // BLOCK, tokens)
            parts["commit_answer"].append(perf_counter() - t)
            running.append(hold)
            seconds = 0.0
            if len(running) > RUNNING:
                oldest = running.popleft()
                t = perf_counter()
                manager.release(oldest)
                seconds = perf_counter() - t
            parts["release"].append(seconds)
    for what in ("request", "request.lru"):
        emit(PEER, what, clock.us().mean(), "us", requests=len(trace))
    for part, mean in clock.means().items():
        emit(PEER, f"request.{part}", mean, "us")
    emit(PEER, "lookup.mean", float(np.mean(times)), "us")
    emit(PEER, "lookup.p99", percentile(times, 0.99), "us")


def bench_leaves(proto: Any) -> None:
    """Four blocks out and four in, in a full pool of sequences of four."""
    draw, manager = np.random.default_rng(SEED), proto.Manager(4 * LEAVES)
    times: list[float] = []
    for i in range(LEAVES + 3000):
        tokens = draw.integers(1, VOCABULARY, size=4 * BLOCK, dtype=np.uint32)
        t = perf_counter()
        hold, done = manager.acquire(tokens)
        manager.release(manager.commit(hold, done, tokens))
        if i >= LEAVES:
            times.append(1e6 * (perf_counter() - t))
    emit(PEER, "evict.lru", percentile(times, 0.5), "us", p99=round(percentile(times, 0.99), 2))


def bench_store(proto: Any) -> None:
    """Prefixes of chains of a thousand blocks."""
    draw, manager = np.random.default_rng(SEED), proto.Manager(1_100_000)
    chains: list[np.ndarray] = []
    for c in range(CHAINS):
        chain = draw.integers(1, VOCABULARY, size=1000 * BLOCK, dtype=np.uint32)
        hold, done = manager.acquire(chain)
        manager.release(manager.commit(hold, done, chain))
        if c < 200:
            chains.append(chain)
    miss = [draw.integers(1, VOCABULARY, size=10 * BLOCK, dtype=np.uint32) for _ in chains]
    kinds = {"miss": miss} | {
        str(length): [chain[: length * BLOCK] for chain in chains] for length in (10, 100, 1000)
    }
    for what, sequences in kinds.items():
        times: list[float] = []
        for i in range(2000):
            tokens = sequences[i % len(sequences)]
            t = perf_counter()
            manager.lookup(tokens)
            times.append(1e6 * (perf_counter() - t))
        emit(PEER, f"find.{what}", percentile(times, 0.5), "us")


def bench_memory(proto: Any) -> None:
    """The common trace in a pool of a million blocks."""
    trace, before = Trace(SEED), resident_bytes()
    manager = proto.Manager(1_000_000)
    for _, _, signed in trace:
        tokens = signed.view(np.uint32)
        hold, done = manager.acquire(tokens)
        manager.release(manager.commit(hold, done, tokens))
        if manager.stats()[2] <= 10_000:
            break
    stored = 1_000_000 - manager.stats()[2]
    del tokens, signed
    emit(PEER, "memory.tiers_1", (resident_bytes() - before) / stored, "B", blocks=stored)


BENCHES = {
    "request": bench_request,
    "leaves": bench_leaves,
    "store": bench_store,
    "memory": bench_memory,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=BENCHES)
    given = parser.parse_args()
    sys.path.insert(0, os.environ["KVTRIE_PROTOTYPE"])
    import proto  # pyright: ignore[reportMissingImports]

    BENCHES[given.what](proto)


if __name__ == "__main__":
    main()
