"""Policies on whole traces: equal to other implementations where they mean the same."""

import numpy as np
import pytest

from kvtrie import BlockManager, Tier
from kvtrie.settings.tier import DEFAULT_POLICY
from kvtrie.sim.replay import open_manager, replay
from kvtrie.sim.workloads import FAMILIES

TRACES = {name: make(requests=500, seed=9) for name, make in FAMILIES.items()}


def singles(stream, capacity, policy):
    """Hits if every block is a separate request."""
    manager = open_manager([Tier("gpu", blocks=capacity)], policy=policy)
    hits = 0
    for now, block in enumerate(stream.reshape(-1, 1)):
        lease = manager.acquire(block, now=now, keep=0)
        hits += lease.matched
        lease.commit(block[lease.matched :], now=now)
        lease.release(now=now)
    return hits


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("lru", "LRU"), ("fifo", "FIFO"), ("lfu", "LFU")],
)
@pytest.mark.parametrize("name", sorted(TRACES))
def test_single_blocks_are_served_as_by_libcachesim(name, ours, theirs):
    stream = np.concatenate([request.blocks for request in TRACES[name]])
    for capacity in (100, 400):
        assert singles(stream, capacity, ours) == theirs_of(stream, capacity, theirs) > 0


def theirs_of(stream, capacity, policy):
    """The same of libcachesim's."""
    libcachesim = pytest.importorskip("libcachesim", reason="no wheel of it for this platform")
    cache = getattr(libcachesim, policy)(cache_size=capacity)
    wanted = libcachesim.Request()
    wanted.obj_size = 1
    hits = 0
    for block in stream.tolist():
        wanted.obj_id = block
        hits += cache.get(wanted)
    return hits


def scans():
    """Streams of blocks that mostly come once, or whose popularity is skewed or moves."""
    draw, number = np.random.default_rng(0), 20_000
    at, once = np.arange(number), 10**6 + np.arange(number)
    popular = draw.random(number) < 0.3
    return {
        "one-hit wonders": np.where(popular, draw.integers(0, 40, number), once),
        "alternation": np.where(at % 2 == 1, draw.integers(0, 30, number), once),
        "zipf": draw.zipf(1.2, number) % 5000,
        "loop": at % 80,
        "shift": draw.integers(0, 50, number) + at // 2000 * 1000,
    }


@pytest.mark.parametrize("name", scans())
def test_the_default_policy_resists_scans_as_well_as_the_best_peer(name):
    stream, capacity = scans()[name].astype(np.uint32), 64
    best = max(theirs_of(stream, capacity, peer) for peer in ("ARC", "S3FIFO", "LIRS"))
    assert singles(stream, capacity, DEFAULT_POLICY) >= 0.9 * best > 0


def saved(name, policy, capacity, **settings):
    tiers = [Tier("gpu", blocks=capacity)]
    return replay(TRACES[name], open_manager(tiers, policy=policy, **settings)).cost_rate


def test_a_flood_hurts_lru_most():
    capacity = 500
    lru = saved("flood", "lru", capacity)
    assert all(saved("flood", policy, capacity) > lru for policy in ("learned", "retention"))


@pytest.mark.parametrize("policy", BlockManager.policies())
def test_figures_add_up(policy):
    for structure in ("leaf-only", "holes"):
        tiers = [Tier("gpu", blocks=200)]
        played = replay(TRACES["shared"], open_manager(tiers, policy=policy, structure=structure))
        assert played.tokens_hit <= 512 * played.hits
        assert played.tokens_hit >= 512 * played.hits - 511 * played.requests
        assert 0 < played.cost_saved < played.cost
        assert 512 * played.hits <= played.cost_saved
        assert (played.recomputed > 0) <= (structure == "holes")
