"""Policies on whole traces: equal to other implementations where they mean the same."""

import numpy as np
import pytest

from kvtrie import BlockManager, Tier
from kvtrie.sim.replay import open_manager, replay
from kvtrie.sim.workloads import FAMILIES

TRACES = {name: make(requests=500, seed=9) for name, make in FAMILIES.items()}


def singles(stream, capacity, policy):
    """Hits where every block is a request of its own."""
    manager = open_manager([Tier("gpu", blocks=capacity)], policy=policy)
    hits = 0
    for now, block in enumerate(stream.reshape(-1, 1)):
        lease = manager.acquire(block, now=now, keep=0)
        hits += lease.matched
        lease.commit(block[lease.matched :], now=now)
        lease.release(now=now)
    return hits


@pytest.mark.parametrize(
    ("ours", "theirs", "apart"),
    [("lru", "LRU", 0), ("fifo", "FIFO", 0), ("lfu", "LFU", 0), ("arc", "ARC", 0.005)],
)
@pytest.mark.parametrize("name", sorted(TRACES))
def test_single_blocks_are_served_as_by_libcachesim(name, ours, theirs, apart):
    libcachesim = pytest.importorskip("libcachesim", reason="no wheel of it for this platform")
    stream = np.concatenate([request.blocks for request in TRACES[name]])
    for capacity in (100, 400):
        cache = getattr(libcachesim, theirs)(cache_size=capacity)
        asked = libcachesim.Request()
        asked.obj_size = 1
        expected = 0
        for block in stream.tolist():
            asked.obj_id = block
            expected += cache.get(asked)
        found = singles(stream, capacity, ours)
        assert abs(found - expected) <= apart * len(stream)
        assert found > 0


class Arc:
    """Adaptive replacement as published, but room is made before what comes is looked at."""

    def __init__(self, capacity):
        self.capacity = capacity
        self.once, self.again, self.lost_once, self.lost_again = {}, {}, {}, {}
        self.target = 0.0

    def serve(self, block):
        hit = block in self.once or block in self.again
        if hit:
            self.once.pop(block, None)
            self.again.pop(block, None)
            self.again[block] = None
            return True
        if len(self.once) + len(self.again) == self.capacity:
            self.make_room()
        self.admit(block)
        return False

    def make_room(self):
        if (self.once and len(self.once) > self.target) or not self.again:
            self.lost_once[oldest(self.once)] = None
        else:
            self.lost_again[oldest(self.again)] = None
        while len(self.once) + len(self.lost_once) > self.capacity:
            oldest(self.lost_once)
        lists = (self.once, self.again, self.lost_once, self.lost_again)
        while sum(map(len, lists)) > 2 * self.capacity:
            oldest(self.lost_again)

    def admit(self, block):
        ratio = len(self.lost_again) / max(1, len(self.lost_once))
        if block in self.lost_once:
            self.target = min(self.capacity, self.target + max(1, ratio))
            del self.lost_once[block]
            self.again[block] = None
        elif block in self.lost_again:
            self.target = max(0, self.target - max(1, len(self.lost_once) / len(self.lost_again)))
            del self.lost_again[block]
            self.again[block] = None
        else:
            self.once[block] = None


def oldest(of):
    key = next(iter(of))
    del of[key]
    return key


@pytest.mark.parametrize("name", sorted(TRACES))
def test_arc_is_the_published_one_with_room_made_first(name):
    stream = np.concatenate([request.blocks for request in TRACES[name]])
    for capacity in (100, 400):
        cache = Arc(capacity)
        expected = sum(cache.serve(block) for block in stream.tolist())
        assert abs(singles(stream, capacity, "arc") - expected) <= 0.0005 * len(stream)


def saved(name, policy, capacity, **settings):
    tiers = [Tier("gpu", blocks=capacity)]
    return replay(TRACES[name], open_manager(tiers, policy=policy, **settings)).cost_rate


def test_a_flood_hurts_lru_most():
    capacity = 500
    lru = saved("flood", "lru", capacity)
    assert all(
        saved("flood", policy, capacity) > lru for policy in ("gdsf", "arc", "lirs", "retention")
    )


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
