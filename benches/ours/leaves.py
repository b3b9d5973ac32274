"""Four blocks out and four in, in a pool full of unrelated sequences of four blocks.

Each step takes a new sequence: acquire evicts four blocks, commit inserts four, release lets them
go. Cost: the fill, half a second to some seconds by policy, and the steps.
"""

from __future__ import annotations

import argparse
import gc
from time import perf_counter

import numpy as np

from benches.measure import emit, percentile
from benches.ours.manager import STEP, insert, manager
from benches.workload import BLOCK, SEED, VOCABULARY
from kvtrie.settings.tier import DEFAULT_POLICY


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--policy", default=DEFAULT_POLICY)
    parser.add_argument("--leaves", type=int, default=50_000)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=SEED)
    given = parser.parse_args()
    draw = np.random.default_rng(given.seed)
    managed = manager(4 * given.leaves, given.policy)

    def sequence() -> np.ndarray:
        return draw.integers(1, VOCABULARY, size=4 * BLOCK, dtype=np.uint32)

    for i in range(given.leaves):
        insert(managed, sequence(), STEP * i).release(now=STEP * i)
    gc.freeze()
    times: list[float] = []
    for i in range(given.leaves, given.leaves + given.steps):
        tokens, now = sequence(), STEP * i
        t = perf_counter()
        lease = managed.acquire(tokens, now=now)
        lease.commit(tokens, now=now)
        lease.release(now=now)
        times.append(1e6 * (perf_counter() - t))
    assert managed.stats().tiers["gpu"].dropped == 4 * given.steps
    context = {"policy": given.policy, "leaves": given.leaves, "steps": given.steps}
    context["p99"] = round(percentile(times, 0.99), 2)
    emit("kvtrie", f"evict.{given.policy}", percentile(times, 0.5), "us", **context)


if __name__ == "__main__":
    main()
