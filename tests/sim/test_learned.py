"""The default policy on small streams: after the law of reuse changes, in a flood, with hints of
ends."""

import numpy as np
import pytest

from kvtrie import BlockManager, Release, Scope, Tier
from kvtrie.sim.replay import open_manager, replay
from kvtrie.sim.trace import TraceRequest
from kvtrie.sim.workloads import FAMILIES

ROOM = 400
# Ids of a trace that is played after another one.
APART = 1 << 20


def saved(requests, policy, skip=0, room=ROOM, **more):
    """Blocks found by requests after the first `skip`, which are played too."""
    manager = open_manager([Tier("gpu", blocks=room)], policy=policy, **more)
    before = replay(requests[:skip], manager).hits if skip else 0
    hits = manager.stats().tiers["gpu"].hits
    assert hits == before
    replay(requests[skip:], manager)
    return manager.stats().tiers["gpu"].hits - hits


def later(requests, first, ids):
    """The same requests at other times, of other blocks."""
    return [
        TraceRequest(r.at + first, r.input_tokens, r.output_tokens, r.blocks + ids, r.session)
        for r in requests
    ]


def periodic(period, requests, ids):
    """Documents that come back after a number of requests, without questions after them."""
    return [
        TraceRequest(at, 4 * 512, 1, np.arange(4, dtype=np.uint32) + ids + 4 * (at % period))
        for at in range(requests)
    ]


@pytest.mark.parametrize(("before", "after"), [("shared", "chats"), ("chats", "agents")])
def test_after_a_flip_of_the_law_it_saves_about_what_it_would_have_saved(before, after):
    old = FAMILIES[before](requests=1500, seed=3)
    new = later(FAMILIES[after](requests=2500, seed=4), old[-1].at, APART)
    both = saved([*old, *new], "learned", skip=len(old))
    fresh = saved(new, "learned")
    requested = sum(len(request.blocks) for request in new)
    assert both / requested >= fresh / requested - 0.025


def test_a_flood_of_prompts_that_nobody_asks_for_again_costs_it_no_more_than_lru():
    chats = FAMILIES["chats"](requests=2000, seed=5)
    prompts = [np.arange(12, dtype=np.uint32) + APART + 12 * n for n in range(600)]
    flood = [TraceRequest(chats[1000].at, 12 * 512, 1, blocks) for blocks in prompts]
    stream = [*chats[:1000], *flood, *chats[1000:]]
    assert saved(stream, "learned", skip=1600) >= saved(stream, "lru", skip=1600)
    assert saved(stream, "learned", skip=1000) > saved(stream, "lru", skip=1000)


def test_a_part_of_a_loop_longer_than_the_room_stays():
    # Under lru each document leaves just before it is wanted.
    loop = periodic(150, 3000, 0)
    assert saved(loop, "lru") == 0
    assert saved(loop, "learned", skip=1500) > 0.3 * 4 * 1500


def test_reported_ends_of_sessions_save_blocks():
    chats, at = [], 0
    draw = np.random.default_rng(1)
    opened = []
    for chat in range(300):
        opened.append([chat, 0])
        while len(opened) > 20:
            one = opened[int(draw.integers(len(opened)))]
            one[1] += 1
            blocks = np.arange(3 * one[1], dtype=np.uint32) + 100 * one[0]
            at += 1000
            chats.append(TraceRequest(at, 512 * len(blocks), 1, blocks, f"chat {one[0]}"))
            if one[1] == 5:
                opened.remove(one)
    for policy in ("lru", "learned"):
        hits = [
            replay(chats, open_manager([Tier("gpu", blocks=150)], policy=policy), ends=ends).hits
            for ends in (False, True)
        ]
        assert hits[0] < hits[1]


def test_an_end_means_that_the_session_is_over():
    manager = open_manager([Tier("gpu", blocks=20)], policy="lru")
    blocks = [np.arange(4, dtype=np.uint32) + 10 * n for n in range(2)]
    requests = [TraceRequest(n, 2048, 1, blocks[n], f"chat {n}") for n in (0, 1)]
    replay([*requests, TraceRequest(9, 2048, 1, blocks[1], "chat 1")], manager, ends=True)
    for prompt in blocks:
        found = manager.lookup(prompt, now=10, keep=0).blocks
        assert [manager.explain(block, now=10).priority for block in found] == [0] * 4


def test_of_single_blocks_it_finds_about_what_counting_uses_finds():
    rng = np.random.default_rng(0)
    often = rng.integers(0, 40, 12_000)
    once = APART + np.arange(len(often))
    streams = {
        "one-hit wonders": np.where(rng.random(len(often)) < 0.3, often, once),
        "alternation": np.where(np.arange(len(often)) % 2 == 0, often, once),
    }
    for blocks in streams.values():
        requests = [
            TraceRequest(at, 512, 1, block.reshape(1)) for at, block in enumerate(np.uint32(blocks))
        ]
        policies = ("learned", "lfu", "lru")
        found = {name: saved(requests, name, skip=6000, room=64) for name in policies}
        assert found["learned"] >= 0.9 * found["lfu"] > 1.1 * found["lru"]


def test_explain_gives_the_value_in_words():
    manager = open_manager([Tier("gpu", blocks=50)])
    prompt = np.arange(6, dtype=np.uint32)
    for now in range(3):
        with manager.acquire(prompt, now=now, keep=0) as lease:
            lease.commit(prompt[lease.matched :], now=now)
    found = manager.lookup(prompt, now=9, keep=0).blocks
    words = [manager.explain(block, now=9).words for block in found]
    assert words[0].startswith("turn 1, used 2 times before; 1 requests ago. Of ")
    assert words[-1].startswith(
        "the last block of a prompt in turn 1, used 2 times before; 1 requests ago. Of "
    )
    assert all("uses per request, times" in text for text in words)
    plain = open_manager([Tier("gpu", blocks=50)], policy="lru")
    with plain.acquire(prompt, now=0, keep=0) as lease:
        lease.commit(prompt, now=0)
    assert plain.explain(plain.lookup(prompt, now=1, keep=0).blocks[0], now=1).words is None


@pytest.mark.parametrize("policy", ["learned", "retention", "flat", "weighted"])
def test_under_the_objective_of_hits_context_counts_for_nothing(policy):
    values = {}
    for objective in ("cost", "balanced", "hits"):
        manager = open_manager([Tier("gpu", blocks=50)], policy=policy, objective=objective)
        prompt = np.arange(9, dtype=np.uint32)
        with manager.acquire(prompt, now=0, keep=0) as lease:
            lease.commit(prompt, now=0)
        found = manager.lookup(prompt, now=5, keep=0).blocks
        values[objective] = [manager.explain(block, now=5).terms["base"] for block in found]
    assert values["hits"] == [1.0] * 9
    assert values["cost"][8] > 1
    assert values["balanced"] == pytest.approx([base**0.5 for base in values["cost"]])


def test_hits_are_more_the_less_context_counts():
    requests = FAMILIES["agents"](requests=2000, seed=2)
    objectives = ("cost", "balanced", "hits")
    hits = [saved(requests, "learned", room=200, objective=each) for each in objectives]
    assert hits == sorted(set(hits))


def test_a_policy_without_values_has_no_other_objective():
    for policy in set(BlockManager.policies()) - {"learned", "retention", "flat", "weighted"}:
        with pytest.raises(ValueError, match="has no values: choose one of retention, flat"):
            open_manager([Tier("gpu", blocks=50)], policy=policy, objective="hits")


def test_the_session_that_returns_soonest_is_expected_first():
    manager = open_manager([Tier("gpu", blocks=4000)])
    now = 0

    def ask(session, first, blocks):
        nonlocal now
        now += 1
        prompt = np.arange(blocks, dtype=np.uint32) + first
        with manager.acquire(prompt, now=now, session=session, keep=0) as lease:
            assert [name for name, _ in manager.expected_sessions(now=now)].count(session) == 0
            lease.commit(prompt[lease.matched :], now=now)

    # Second turns of one kind of session come at once; sessions that have had two are over.
    for chat in range(1200):
        for turn in (1, 2):
            ask(f"chat {chat}", 20 * chat, 8 * turn)
    ask("new", 1 << 20, 8)
    expected = manager.expected_sessions(3, now=now)
    assert expected[0][0] == "new"
    assert len(expected) == 3
    assert [rate for _, rate in expected] == sorted((rate for _, rate in expected), reverse=True)
    assert expected[0][1] > 5 * expected[1][1]
    everyone = manager.expected_sessions(now=now)
    assert expected == everyone[:3]
    manager.hint([Release(session="new")], now=now)
    assert "new" not in dict(manager.expected_sessions(now=now))
    assert manager.expected_sessions(now=now, scope=Scope(tenant=b"nobody")) == []


def test_without_learning_no_session_is_expected():
    manager = open_manager([Tier("gpu", blocks=20)], policy="lru")
    prompt = np.arange(4, dtype=np.uint32)
    with manager.acquire(prompt, now=0, session="chat", keep=0) as lease:
        lease.commit(prompt, now=0)
    assert manager.expected_sessions(now=1) == []
