"""Times of the manager's calls through Python: requests, lookups, evictions, decoding, marks.

Every argument is made before the clock starts. One tier without bytes, so that no copy is timed.
"""

from __future__ import annotations

from itertools import cycle, islice
from typing import TYPE_CHECKING

import numpy as np
import pytest

from benches.ours.manager import MODEL, manager
from benches.workload import BLOCK, VOCABULARY, Trace
from kvtrie import BlockManager, Tier

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

LEAVES = 50_000
CONVERSATIONS = 400


def serve(managed: BlockManager, text: np.ndarray, prompt: int, now: int) -> None:
    """One request: lookup, room, commit of the prompt's rest and the answer, release."""
    lease = managed.acquire(text[:prompt], now=now, reserve=len(text) - prompt)
    lease.commit(text[lease.matched : prompt], now=now)
    lease.commit(text[prompt:], now=now)
    lease.release(now=now)


def filled(leaves: int, policy: str) -> tuple[BlockManager, int]:
    """A full pool of unrelated sequences of four blocks, and the time."""
    managed = manager(4 * leaves, policy)
    draw = np.random.default_rng(3)
    for now in range(leaves):
        tokens = draw.integers(1, VOCABULARY, 4 * BLOCK, dtype=np.uint32)
        serve(managed, tokens, len(tokens) - 1, now)
    return managed, leaves


@pytest.fixture(scope="module")
def trace() -> list[tuple[np.ndarray, int]]:
    """About 2000 requests of mean 95 prompt blocks: the common trace, shorter."""
    return [
        (tokens.view(np.uint32), prompt) for _, prompt, tokens in Trace(conversations=CONVERSATIONS)
    ]


def test_whole_request(benchmark: BenchmarkFixture, trace: list[tuple[np.ndarray, int]]) -> None:
    managed = manager(100_000)
    for now, (text, prompt) in enumerate(trace):
        serve(managed, text, prompt, now)
    turns = cycle(trace)
    benchmark.pedantic(
        lambda text, prompt: serve(managed, text, prompt, 10**9),
        setup=lambda: (next(turns), {}),
        rounds=2000,
    )


def test_lookup(benchmark: BenchmarkFixture, trace: list[tuple[np.ndarray, int]]) -> None:
    managed = manager(100_000)
    for now, (text, prompt) in enumerate(trace):
        serve(managed, text, prompt, now)
    prompts = cycle([text[:prompt] for text, prompt in trace])
    benchmark.pedantic(
        lambda prompt: managed.lookup(prompt, now=10**9),
        setup=lambda: ((next(prompts),), {}),
        rounds=5000,
    )


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


@pytest.mark.timeout(600)
@pytest.mark.parametrize("policy", BlockManager.policies())
def test_evict_4_insert_4(benchmark: BenchmarkFixture, policy: str) -> None:
    # Policies with many classes or a scan take a smaller pool; its size is in the name.
    leaves = LEAVES if policy in {"lru", "flat", "retention"} else LEAVES // 25
    managed, now = filled(leaves, policy)
    benchmark.extra_info["leaves"] = leaves
    draw = np.random.default_rng(5)
    fresh = iter(draw.integers(1, VOCABULARY, (600, 4 * BLOCK), dtype=np.uint32))
    benchmark.pedantic(
        lambda tokens: serve(managed, tokens, len(tokens) - 1, now),
        setup=lambda: ((next(fresh),), {}),
        rounds=500,
    )


def test_decode_one_token(benchmark: BenchmarkFixture) -> None:
    managed = manager(10_000)
    lease = managed.acquire(np.arange(1, 1600, dtype=np.uint32), now=0, reserve=100_000)
    lease.commit(np.arange(1, 1600, dtype=np.uint32), now=0)
    token = np.array([7], dtype=np.uint32)
    benchmark.pedantic(lambda: lease.commit(token, now=1), rounds=5000)


def test_decode_64_requests(benchmark: BenchmarkFixture) -> None:
    managed = manager(20_000)
    leases = []
    for at in range(64):
        prompt = np.arange(at * 5000 + 1, at * 5000 + 160, dtype=np.uint32)
        lease = managed.acquire(prompt, now=0, reserve=3000)
        lease.commit(prompt, now=0)
        leases.append(lease)
    ids = np.array([lease.id for lease in leases], dtype=np.uint64)
    tokens = np.arange(64, dtype=np.uint32)
    benchmark.pedantic(lambda: managed.commit_many(ids, tokens, now=1), rounds=2000)


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


@pytest.mark.parametrize("run", [16, 100])
def test_mark(benchmark: BenchmarkFixture, run: int) -> None:
    managed = manager(1_000_000)
    draw = np.random.default_rng(9)
    fresh = iter(draw.integers(1, VOCABULARY, (600, run * BLOCK), dtype=np.uint32))
    benchmark.pedantic(
        lambda tokens: managed.mark(tokens, 0, present=True, now=1),
        setup=lambda: ((next(fresh),), {}),
        rounds=500,
    )


@pytest.mark.parametrize("dtype", ["uint32", "int64"])
@pytest.mark.parametrize("blocks", [0, 10, 100, 1000])
def test_longest_prefix(
    benchmark: BenchmarkFixture,
    trace: list[tuple[np.ndarray, int]],
    blocks: int,
    dtype: str,
) -> None:
    managed = manager(100_000)
    chain = np.random.default_rng(11).integers(1, VOCABULARY, 1000 * BLOCK, dtype=np.uint32)
    managed.mark(chain, 0, present=True, now=1)
    for text, prompt in islice(trace, 100):
        serve(managed, text, prompt, 1)
    query = chain[: blocks * BLOCK] if blocks else np.zeros(100 * BLOCK, dtype=np.uint32)
    query = query.astype(dtype)
    benchmark(lambda: managed.lookup(query, now=2, keep=0))
