"""Policies on whole traces: equal to other implementations where they mean the same."""

import numpy as np
import pytest

from kvtrie import BlockManager, Tier
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
    libcachesim = pytest.importorskip("libcachesim", reason="no wheel of it for this platform")
    stream = np.concatenate([request.blocks for request in TRACES[name]])
    for capacity in (100, 400):
        cache = getattr(libcachesim, theirs)(cache_size=capacity)
        wanted = libcachesim.Request()
        wanted.obj_size = 1
        expected = 0
        for block in stream.tolist():
            wanted.obj_id = block
            expected += cache.get(wanted)
        found = singles(stream, capacity, ours)
        assert found == expected > 0


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
