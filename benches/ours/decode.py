"""One token of each of many requests in one call, as a decoding engine commits them.

Rooms are reserved before. Every sixteenth token of a request completes a block, and the mean over
all steps has those in it. Cost: a second.
"""

from __future__ import annotations

import argparse
import gc
from time import perf_counter

import numpy as np

from benches.measure import emit
from benches.ours.manager import manager
from benches.workload import BLOCK, RUNNING, SEED, VOCABULARY


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=RUNNING)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--prompt", type=int, default=1600)
    parser.add_argument("--seed", type=int, default=SEED)
    given = parser.parse_args()
    draw = np.random.default_rng(given.seed)
    managed = manager(given.requests * (given.prompt + given.steps + BLOCK) // BLOCK)
    leases = []
    for _ in range(given.requests):
        prompt = draw.integers(1, VOCABULARY, size=given.prompt, dtype=np.uint32)
        leases.append(managed.acquire(prompt, now=0, reserve=given.steps))
        leases[-1].commit(prompt, now=0)
    ids = np.array([lease.id for lease in leases], dtype=np.uint64)
    steps = draw.integers(1, VOCABULARY, size=(given.steps, given.requests), dtype=np.uint32)
    gc.freeze()
    seconds = 0.0
    for now, tokens in enumerate(steps):
        t = perf_counter()
        managed.commit_many(ids, tokens, now=now)
        seconds += perf_counter() - t
    context = {"requests": given.requests, "steps": given.steps, "prompt": given.prompt}
    emit("kvtrie", "decode", 1e6 * seconds / steps.size, "us", **context)


if __name__ == "__main__":
    main()
