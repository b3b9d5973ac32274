"""Times of calls through Python that `make bench-core` has no row for: lookups in batches, stats.

Every argument is made before the clock starts. One tier without bytes, so that no copy is timed.
"""

from __future__ import annotations

from itertools import cycle, islice
from typing import TYPE_CHECKING

import numpy as np
import pytest

from benches.ours.manager import MODEL, manager
from benches.workload import Trace
from kvtrie import BlockManager, Tier

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

CONVERSATIONS = 400


def serve(managed: BlockManager, text: np.ndarray, prompt: int, now: int) -> None:
    """One request: lookup, room, commit of the prompt's rest and the answer, release."""
    lease = managed.acquire(text[:prompt], now=now, reserve=len(text) - prompt)
    lease.commit(text[lease.matched : prompt], now=now)
    lease.commit(text[prompt:], now=now)
    lease.release(now=now)


@pytest.fixture(scope="module")
def trace() -> list[tuple[np.ndarray, int]]:
    """About 2000 requests of mean 95 prompt blocks: the common trace, shorter."""
    return [
        (tokens.view(np.uint32), prompt) for _, prompt, tokens in Trace(conversations=CONVERSATIONS)
    ]


def test_lookup_64_prompts(
    benchmark: BenchmarkFixture, trace: list[tuple[np.ndarray, int]]
) -> None:
    managed = manager(100_000)
    for now, (text, prompt) in enumerate(trace):
        serve(managed, text, prompt, now)
    prompts = [text[:prompt] for text, prompt in trace]
    batches = cycle([prompts[at : at + 64] for at in range(0, len(prompts) - 63, 64)])
    benchmark.pedantic(
        lambda batch: managed.lookup_many(batch, now=10**9),
        setup=lambda: ((next(batches),), {}),
        rounds=500,
    )


def test_stats(benchmark: BenchmarkFixture, trace: list[tuple[np.ndarray, int]]) -> None:
    tiers = [Tier(kind, blocks=800, owner="none") for kind in ("gpu", "host", "disk")]
    managed = BlockManager(MODEL, tiers)
    for now, (text, prompt) in enumerate(islice(trace, 100)):
        lease = managed.acquire(text[:prompt], now=now)
        while len(moves := managed.moves()):
            managed.complete(moves.id, now=now)
        lease.commit(text[lease.matched : prompt], now=now)
        lease.release(now=now)
    counted = managed.stats().tiers
    assert min(tier.hits + tier.evict_age.count for tier in counted.values()) > 0
    benchmark(managed.stats)
