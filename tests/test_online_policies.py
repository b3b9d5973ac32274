"""Baselines of the table of policies: what a cache of prefixes finds, and renamed requests."""

from collections import Counter

import numpy as np
import pytest

from benches.policies.cells import whole
from benches.policies.finds import best_constants, finds, halves, middle
from benches.policies.online import (
    CONSTANTS,
    DEMOTION,
    RANDOM,
    Demotion,
    RandomCompute,
    named,
    prefixes,
)
from benches.policies.traces import Source, trace_of
from benches.policies.waits import GIVEN, renamed, waits


@pytest.mark.parametrize("family", ["chats", "shared", "common"])
def test_without_demotion_a_cache_of_prefixes_finds_what_lru_finds(family):
    source = Source(family, None, 0, 400)
    requests = trace_of(source)
    paths = [whole(request).blocks.tolist() for request in requests]
    prompts = [len(request.blocks) for request in requests]
    for room in (max(map(len, paths)), middle(source)):
        found = prefixes(paths, prompts, room, Demotion(1.0, room))
        if source.running == 1:
            assert found == finds(source, room, "lru")
        assert sum(found)


def test_blocks_used_once_leave_first_under_demotion():
    paths = [[1, 2], [1, 2], [3], [4], [5], [1, 2]]
    found = prefixes(paths, [len(path) for path in paths], 4, Demotion(0.25, 4))
    assert found == [0, 2, 0, 0, 0, 2]
    assert prefixes(paths, [len(path) for path in paths], 4, Demotion(1.0, 4))[-1] == 1


def test_the_chance_of_a_victim_is_inverse_to_its_cost():
    alpha = 1 / 10_700
    victims = Counter()
    for seed in range(4000):
        rule = RandomCompute(1.0, 10_700, seed)
        last = {0: 0, 1: 1, 3: 3}
        for block, at in last.items():
            rule.put(block, at)
        victims[rule.victim(last)] += 1
    costs = np.array([1 + alpha * 10_700 * at for at in (0, 1, 3)])
    expected = 4000 / costs / (1 / costs).sum()
    seen = [victims[block] for block in (0, 1, 3)]
    assert np.abs(np.array(seen) - expected).max() < 4 * np.sqrt(4000 / 4)


def test_renamed_requests_share_what_a_policy_finds_and_no_more():
    requests = trace_of(Source("chats", None, 0, 200))
    paths = [request.blocks.tolist() for request in requests]
    room = max(map(len, paths)) + 20
    found = prefixes(paths, list(map(len, paths)), room, RandomCompute(1.0, 512, 0))
    seen: set[int] = set()
    for request, n in zip(renamed(requests, found), found, strict=True):
        blocks = request.blocks.tolist()
        assert next((at for at, one in enumerate(blocks) if one not in seen), len(blocks)) == n
        seen.update(blocks)


def test_first_halves_choose_constants_and_runs_have_times():
    source = Source("chats", None, 0, 60)
    names = [named(policy, each) for policy in (RANDOM, DEMOTION) for each in CONSTANTS[policy]]
    rows = [row for name in names for row in halves(source, name)]
    assert best_constants(rows).keys() == {RANDOM, DEMOTION}
    assert all(0 < row.hits < 100 for row in rows)
    light, heavy = waits(source, GIVEN, names[0])
    assert 0 < light.p50 <= light.p90
    assert light.per_s < heavy.per_s
