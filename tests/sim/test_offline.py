"""Knowing the future: the bound is one, by brute force and under every policy."""

import itertools
import random

import numpy as np
import pytest

from kvtrie import BlockManager, Tier
from kvtrie.errors import ConfigError
from kvtrie.sim.offline import leaves_first, most_hits
from kvtrie.sim.replay import open_manager, replay
from kvtrie.sim.trace import TraceRequest
from kvtrie.sim.workloads import FAMILIES

CHATS = FAMILIES["chats"](requests=700, seed=5)
BLOCKS = sum(len(request.blocks) for request in CHATS)


def requests_of(paths):
    return [TraceRequest(0, 512 * len(path), 1, np.array(path, dtype=np.uint32)) for path in paths]


def best(stream, capacity):
    """The most hits of any sequence of evictions, by trying them all."""
    states = {frozenset(): 0}
    for block in stream:
        after = {}
        for cached, hits in states.items():
            if block in cached:
                nexts = [cached]
            elif len(cached) < capacity:
                nexts = [cached | {block}]
            else:
                nexts = [cached - {victim} | {block} for victim in cached]
            for state in nexts:
                after[state] = max(after.get(state, 0), hits + (block in cached))
        states = after
    return max(states.values())


def test_no_choice_of_victims_finds_more():
    rng = random.Random(2)
    for capacity, _ in itertools.product((1, 2, 3), range(20)):
        stream = [rng.randrange(6) for _ in range(18)]
        paths = [[block] for block in stream]
        assert most_hits(requests_of(paths), capacity).hits == best(stream, capacity)


@pytest.mark.grid
@pytest.mark.parametrize("structure", ["leaf-only", "holes"])
@pytest.mark.parametrize("policy", BlockManager.policies())
def test_no_policy_beats_the_bound(policy, structure):
    for capacity in (150, 400, 1500):
        tiers = [Tier("gpu", blocks=capacity)]
        played = replay(CHATS, open_manager(tiers, policy=policy, structure=structure))
        assert played.refused == 0
        assert 0 < played.hits <= most_hits(CHATS, capacity).hits


def test_keeping_prefixes_costs_hits_and_finds_leading_blocks():
    for capacity in (150, 400, 1500):
        cached = leaves_first(CHATS, capacity)
        assert all(found == tuple(range(len(found))) for found in cached.blocks)
        tiers = [Tier("gpu", blocks=capacity)]
        online = replay(CHATS, open_manager(tiers, policy="retention"))
        assert online.hits < cached.hits <= most_hits(CHATS, capacity).hits


def test_with_room_for_all_everything_is_found_again():
    distinct = len(np.unique(np.concatenate([request.blocks for request in CHATS])))
    for plan in (most_hits, leaves_first):
        assert plan(CHATS, distinct).hits == BLOCKS - distinct


def test_the_block_whose_next_use_is_farthest_leaves():
    paths = [[1], [2], [3], [1], [2], [3]]
    assert most_hits(requests_of(paths), 2).blocks == ((), (), (), (0,), (), (0,))
    # 2 and 3 follow 1; the leaf 3 is never requested again.
    paths = [[1, 2], [1, 3], [5], [1, 2]]
    assert leaves_first(requests_of(paths), 3).blocks == ((), (0,), (), (0, 1))


def test_a_request_that_does_not_fit_is_refused():
    for plan in (most_hits, leaves_first):
        with pytest.raises(ConfigError, match="3 blocks, the cache only 2"):
            plan(requests_of([[1, 2, 3]]), 2)
