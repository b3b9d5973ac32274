"""A whole request of the common trace through Python, and the lookup of its prompt.

Two passes, each with a separate manager: in one a request is acquire, commit of the prompt's
rest, commit of the answer, release; in the other each prompt is looked up before, cold, and that
alone is timed. Tokens are `uint32` arrays made before the clock starts.
Cost: about five seconds a pass.
"""

from __future__ import annotations

import argparse
import gc
from collections import deque
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from benches.measure import Clock, emit, percentile
from benches.ours.manager import STEP, manager
from benches.workload import BLOCK, CONVERSATIONS, LRU_POOL, RUNNING, SEED, Trace
from kvtrie.settings.tier import DEFAULT_POLICY

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvtrie import BlockManager, Lease

PARTS = ("acquire", "commit_prompt", "commit_answer", "release")


def play(
    trace: Iterable[tuple[int, int, np.ndarray]],
    managed: BlockManager,
    clock: Clock,
    stop_at: float | None = None,
) -> tuple[int, int, int]:
    """Play the trace; return prompt blocks, those found, and blocks stored."""
    running: deque[Lease] = deque()
    requested = found = stored = 0
    parts = clock.samples
    for i, (_, prompt, signed) in enumerate(trace):
        now, tokens = STEP * i, signed.view(np.uint32)
        question, answer, room = tokens[:prompt], tokens[prompt:], len(tokens) - prompt
        t = perf_counter()
        lease = managed.acquire(question, now=now, reserve=room)
        parts["acquire"].append(perf_counter() - t)
        matched = lease.matched
        rest = tokens[matched:prompt]
        t = perf_counter()
        lease.commit(rest, now=now)
        parts["commit_prompt"].append(perf_counter() - t)
        t = perf_counter()
        lease.commit(answer, now=now)
        parts["commit_answer"].append(perf_counter() - t)
        running.append(lease)
        seconds = 0.0
        if len(running) > RUNNING:
            oldest = running.popleft()
            t = perf_counter()
            oldest.release(now=now)
            seconds = perf_counter() - t
        parts["release"].append(seconds)
        requested += prompt // BLOCK
        found += matched // BLOCK
        stored += len(tokens) // BLOCK - matched // BLOCK
        if stop_at is not None and stored >= stop_at:
            break
    return requested, found, stored


def lookups(trace: Trace, managed: BlockManager) -> list[float]:
    """Microseconds of each prompt's lookup, before the request is served."""
    running: deque[Lease] = deque()
    times: list[float] = []
    for i, (_, prompt, signed) in enumerate(trace):
        now, tokens = STEP * i, signed.view(np.uint32)
        question = tokens[:prompt]
        t = perf_counter()
        managed.lookup(question, now=now)
        times.append(1e6 * (perf_counter() - t))
        lease = managed.acquire(question, now=now, reserve=len(tokens) - prompt)
        lease.commit(tokens[lease.matched :], now=now)
        running.append(lease)
        if len(running) > RUNNING:
            running.popleft().release(now=now)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--policy", default=DEFAULT_POLICY)
    parser.add_argument("--blocks", type=int, default=LRU_POOL)
    parser.add_argument("--conversations", type=int, default=CONVERSATIONS)
    parser.add_argument("--seed", type=int, default=SEED)
    given = parser.parse_args()
    trace, clock = Trace(given.seed, given.conversations), Clock(*PARTS)
    managed = manager(given.blocks, given.policy)
    gc.freeze()
    requested, found, _ = play(trace, managed, clock)
    context = {
        "policy": given.policy,
        "blocks": given.blocks,
        "requests": len(trace),
        "seed": given.seed,
        "hit_rate": round(found / requested, 4),
    }
    if given.policy != DEFAULT_POLICY:  # lru: what the peers play
        emit("kvtrie", f"request.{given.policy}", clock.us().mean(), "us", **context)
        return
    emit("kvtrie", "request", clock.us().mean(), "us", **context)
    for part, mean in clock.means().items():
        emit("kvtrie", f"request.{part}", mean, "us", **context)
    times = lookups(trace, manager(given.blocks, given.policy))
    emit("kvtrie", "lookup.mean", float(np.mean(times)), "us", **context)
    emit("kvtrie", "lookup.p99", percentile(times, 0.99), "us", **context)


if __name__ == "__main__":
    main()
