"""Families of traces: each is what its name promises, and a seed makes the same trace."""

from itertools import pairwise

import pytest

from kvtrie.errors import ConfigError
from kvtrie.sim.trace import read_trace, write_trace
from kvtrie.sim.workloads import FAMILIES

BLOCK = 512

NAMES = sorted(FAMILIES)


def seen_before(requests):
    """Leading blocks of each request that an earlier request had."""
    seen = set()
    for request in requests:
        path = request.blocks.tolist()
        yield next((n for n, block in enumerate(path) if block not in seen), len(path))
        seen.update(path)


@pytest.mark.parametrize("name", NAMES)
def test_one_seed_makes_one_trace(name):
    def flat(requests):
        return [(r.at, r.input_tokens, r.output_tokens, r.blocks.tolist()) for r in requests]

    made = flat(FAMILIES[name](requests=300, seed=3))
    assert made == flat(FAMILIES[name](requests=300, seed=3))
    assert made != flat(FAMILIES[name](requests=300, seed=4))


@pytest.mark.parametrize("name", NAMES)
def test_a_trace_is_one_of_prefixes(name):
    requests = FAMILIES[name](requests=800)
    assert len(requests) == 800
    assert all(a.at <= b.at for a, b in pairwise(requests))
    above = {}
    for request in requests:
        path = request.blocks.tolist()
        assert (len(path) - 1) * BLOCK < request.input_tokens <= len(path) * BLOCK
        assert len(set(path)) == len(path)
        for depth, block in enumerate(path):
            # A block always follows the same ones.
            assert above.setdefault(block, path[:depth][-1:]) == path[:depth][-1:]
        if request.input_tokens % BLOCK:
            above[path[-1]] = "partial"
    assert "partial" in above.values()


def test_families_differ_in_what_can_be_found():
    found = {}
    for name in NAMES:
        requests = FAMILIES[name](requests=3000)
        found[name] = sum(seen_before(requests)) / sum(len(r.blocks) for r in requests)
    assert found["flood"] < found["chats"] < found["shared"]
    assert found["agents"] > 0.85
    assert found["chats"] > 0.6


def test_an_agent_pauses_for_seconds_and_for_minutes():
    requests = FAMILIES["agents"](requests=3000)
    last = {}
    pauses = []
    for request in requests:
        path = request.blocks.tolist()
        # The deepest block that another agent's step had: most agents share only the first ones.
        before = next((last[block] for block in reversed(path[15:]) if block in last), None)
        if before is not None:
            pauses.append((request.at - before) / 1e9)
        last.update(dict.fromkeys(path, request.at))
    slow = sum(pause > 60 for pause in pauses) / len(pauses)
    quick = sum(pause < 20 for pause in pauses) / len(pauses)
    assert 0.05 < slow < 0.25
    assert quick > 0.6


def test_a_flood_comes_in_waves_that_nobody_asks_for_again():
    requests = FAMILIES["flood"](requests=3000)
    ids = [set(request.blocks.tolist()) for request in requests]
    counts = {}
    for blocks in ids:
        for block in blocks:
            counts[block] = counts.get(block, 0) + 1
    once = [r for r, blocks in zip(requests, ids, strict=True) if max(map(counts.get, blocks)) == 1]
    in_waves = [r for r in once if 300 <= r.at / 1e9 % 600 <= 360]
    assert len(in_waves) > 200
    assert len(in_waves) > 0.9 * len(once)


def test_a_family_can_be_written_and_read(tmp_path):
    made = FAMILIES["shared"](requests=50)
    write_trace(tmp_path / "trace.jsonl", made)
    read = read_trace(tmp_path / "trace.jsonl")
    assert [r.blocks.tolist() for r in read] == [r.blocks.tolist() for r in made]


@pytest.mark.parametrize("name", NAMES)
def test_a_trace_of_nothing_is_refused(name):
    with pytest.raises(ConfigError, match="requests is 0"):
        FAMILIES[name](requests=0)
