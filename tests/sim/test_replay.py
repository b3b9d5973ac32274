"""Replay: the manager's hits are those of a cache written in twenty lines."""

import numpy as np
import pytest

from kvtrie import BlockManager, Lane, Tier
from kvtrie.errors import ConfigError
from kvtrie.sim.replay import open_manager, replay
from kvtrie.sim.trace import TraceRequest
from kvtrie.sim.workloads import conversations

TRACE = conversations(seed=7, chats=120, turns=5, active=12)
# A lane over which a block takes longer to load than to compute.
SLOW = Lane("slow", bytes_per_s=1e6)
PATHS = [tuple(request.blocks.tolist()) for request in TRACE]


def two(gpu, host, lane=None):
    return [Tier("gpu", blocks=gpu), Tier("host", blocks=host, read=lane)]


def prefix_lru(paths, capacity):
    """Blocks found by a cache of whole prefixes whose least recently used leaf leaves first.

    A block is the path up to it. The running request's blocks stay while it is inserted.
    """
    used, children, hits = {}, {}, 0
    for now, path in enumerate(paths):
        blocks = [path[: n + 1] for n in range(len(path))]
        found = next((n for n, block in enumerate(blocks) if block not in used), len(blocks))
        hits += found
        while len(used) + len(blocks) - found > capacity:
            leaves = [b for b in used if not children.get(b) and b not in blocks[:found]]
            victim = min(leaves, key=lambda block: (used[block], -len(block)))
            del used[victim]
            children[victim[:-1]] -= 1
        for block in blocks[found:]:
            children[block[:-1]] = children.get(block[:-1], 0) + 1
        used.update(dict.fromkeys(blocks, now))
    return hits


@pytest.mark.parametrize("capacity", [20, 60, 150, 10_000])
def test_lru_hits_are_those_of_the_simple_cache(capacity):
    played = replay(TRACE, open_manager([Tier("gpu", blocks=capacity)], policy="lru"))
    expected = prefix_lru(PATHS, capacity)
    assert played.hits == expected
    assert played.hit_rate == expected / sum(map(len, PATHS))
    assert 0 < played.hits < played.blocks
    # Inserted blocks that have not been dropped are still there.
    inserted = played.blocks - played.hits
    assert (played.tiers[0].dropped > 0) == (inserted > capacity)
    assert inserted - played.tiers[0].dropped <= capacity


@pytest.mark.parametrize("structure", ["leaf-only", "holes"])
@pytest.mark.parametrize("policy", BlockManager.policies())
def test_the_same_trace_gives_the_same_figures(policy, structure):
    def once():
        return replay(TRACE, open_manager(two(40, 80), policy=policy, structure=structure))

    played = once()
    assert played == once()
    assert played.requests == len(TRACE)
    assert played.tokens == 512 * played.blocks
    assert played.waited_s > 0
    assert 0 < played.hit_rate < 1
    assert (played.recomputed > 0) <= (structure == "holes")


def test_hits_of_two_tiers_add_up():
    gpu, host = 40, 80
    played = replay(TRACE, open_manager(two(gpu, host), policy="lru"))
    assert [tier.kind for tier in played.tiers] == ["gpu", "host"]
    assert [tier.blocks for tier in played.tiers] == [gpu, host]
    assert all(tier.hits > 0 for tier in played.tiers)
    assert played.hits == sum(tier.hits for tier in played.tiers)
    # The first tier alone finds what it finds without the second one.
    assert played.tiers[0].hits == prefix_lru(PATHS, gpu)
    assert prefix_lru(PATHS, host) < played.hits <= prefix_lru(PATHS, gpu + host)
    demoted = played.tiers[0].demoted
    assert demoted > 0
    assert played.tiers[0].dropped == 0
    assert demoted - (played.tiers[1].clean + played.tiers[1].dropped) <= host


def test_computing_what_is_sooner_computed_is_no_hit():
    def played(load):
        return replay(TRACE, open_manager(two(40, 80, SLOW)), load=load)

    loaded, planned = played("all"), played("plan")
    assert loaded.recomputed == 0
    assert planned.recomputed > 0
    assert planned.hits < loaded.hits
    assert planned.waited_s < loaded.waited_s


def test_what_does_not_fit_is_refused_and_counted():
    longest = max(map(len, PATHS))
    played = replay(TRACE, open_manager([Tier("gpu", blocks=longest - 1)], policy="lru"))
    assert played.refused == sum(len(path) == longest for path in PATHS) > 0
    assert played.blocks == sum(map(len, PATHS))


def test_a_prompt_waits_for_stores_that_hold_its_slots():
    gpu = 8
    longs = [
        TraceRequest(at, 512 * gpu, 1, np.arange(gpu, dtype=np.uint32) + first)
        for at, first in ((0, 0), (1, 100), (2, 0))
    ]
    tiers = [Tier("gpu", blocks=gpu, write="through"), Tier("host", blocks=100, store=SLOW)]
    played = replay(longs, open_manager(tiers, policy="lru"))
    assert played.refused == 0
    assert played.tiers[1].hits == gpu


def test_a_prompt_that_waits_is_tried_once_per_room_that_it_lacks():
    gpu = 64
    longs = [
        TraceRequest(at, 512 * gpu, 1, np.arange(gpu, dtype=np.uint32) + 100 * at)
        for at in range(3)
    ]
    tiers = [Tier("gpu", blocks=gpu, write="through"), Tier("host", blocks=200, store=SLOW)]
    manager = open_manager(tiers, policy="lru")
    assert replay(longs, manager).refused == 0
    assert manager.stats().refused <= 2 * len(longs)


def test_a_prompt_waits_for_requests_that_hold_its_slots():
    alone = [
        TraceRequest(at, 512 * 6, 1, np.arange(6, dtype=np.uint32) + 100 * at) for at in range(4)
    ]
    played = replay(alone, open_manager([Tier("gpu", blocks=8)], policy="lru"), running=3)
    assert played.refused == 0


def test_what_the_manager_refuses_is_refused():
    with pytest.raises(ConfigError, match="'best'"):
        open_manager([Tier("gpu", blocks=4)], policy="best")
    with pytest.raises(ConfigError, match="tiers"):
        open_manager(reversed(two(4, 4)))
