"""Hints through Python: what they say, what they are answered, and where they hold."""

from __future__ import annotations

import math
from datetime import timedelta

import numpy as np
import pytest
from keeping import SECOND, WALL, Clock, ask, kv, prompt, serving
from serving import MODEL, complete_all_moves, one_tier, serve, tokens, two_tiers

from kvtrie import (
    BlockManager,
    ConfigError,
    Demote,
    NoSpaceError,
    Prefetch,
    Quota,
    Release,
    Retain,
    Scope,
    Tier,
)


def say(manager, hint, now):
    [reply] = manager.hint([hint], now=now)
    manager.audit()
    return reply.answer, reply.blocks, reply.not_applied


def priorities(manager, sequence, now, tier=0):
    blocks = manager.lookup(sequence, now=now, keep=0).blocks
    return [manager.explain(block, now=now, tier=tier).priority for block in blocks]


@pytest.mark.parametrize("policy", BlockManager.policies())
def test_lower_priorities_leave_first_under_every_policy(policy):
    manager = one_tier(blocks=4, policy=policy)
    for stem in range(4):
        serve(manager, tokens(1, start=100 * stem), now=10 + stem)
    for stem, priority in enumerate([80, 5, 60, 35]):
        hint = Retain(tokens=tokens(1, start=100 * stem), priority=priority)
        # Half of the tier may be retained.
        assert say(manager, hint, 20) == ("accepted", 1, 0)
    left = []
    for stem in range(4, 8):
        manager.acquire(tokens(1, start=100 * stem), now=30 + stem)
        cached = [manager.lookup(tokens(1, start=100 * s), now=50, keep=0).tokens for s in range(4)]
        left += [s for s in range(4) if not cached[s] and s not in left]
    assert left == [1, 3, 2, 0]


def test_an_answer_says_how_far_a_hint_reaches():
    manager = one_tier(blocks=8)
    serve(manager, tokens(2), now=1)
    [reply] = manager.hint([Retain(tokens=tokens(3), priority=70)], now=2)
    assert (reply.answer, reply.blocks, reply.not_applied) == ("deferred", 2, 1)
    assert reply.reason == "1 blocks are not cached yet"
    assert "deferred" in repr(reply)
    serve(manager, tokens(4), now=3)
    assert priorities(manager, tokens(4), 4) == [70, 70, 70, 35]
    [reply] = manager.hint([Retain(tokens=tokens(4), priority=70, owner="b")], now=5)
    assert (reply.answer, reply.blocks, reply.not_applied) == ("accepted", 4, 0)
    assert reply.reason == ""
    serve(manager, tokens(1, start=50), now=6)
    [reply] = manager.hint([Retain(tokens=tokens(1, start=50), priority=70)], now=7)
    assert (reply.answer, reply.not_applied) == ("clipped", 1)
    assert "retained_share" in reply.reason
    assert manager.hint([], now=8) == []


def test_a_timedelta_is_nanoseconds():
    hint = Retain(tokens=[1], ttl=timedelta(milliseconds=5), decode_ttl=None)
    assert hint.ttl == 5_000_000
    manager = one_tier()
    serve(manager, tokens(1), now=1)
    say(manager, Retain(tokens=tokens(1), priority=70, ttl=timedelta(microseconds=1)), 10)
    manager.hint([], now=1009)
    assert priorities(manager, tokens(1), 1009) == [70]
    manager.hint([], now=1010)
    assert priorities(manager, tokens(1), 1010) == [35]


def test_a_lease_by_itself_or_by_its_id_and_its_session():
    manager = one_tier(blocks=16)
    with manager.acquire(tokens(1), now=1, keep=0, reserve=8, session="s") as lease:
        assert say(manager, Retain(lease=lease, priority=60), 1) == ("deferred", 0, 1)
        assert say(manager, Retain(lease=lease.id, decode_priority=9), 1)[0] == "deferred"
        lease.commit(tokens(3), now=2)
        # The session's last hint about a block counts.
        assert priorities(manager, tokens(3), 2) == [35, 9, 9]
    assert say(manager, Retain(lease=lease.id, priority=60), 3) == ("rejected", 0, 0)
    assert say(manager, Release(session="s"), 4) == ("accepted", 3, 0)
    assert priorities(manager, tokens(3), 4) == [0, 0, 0]


def test_scopes_keep_hints_apart():
    manager = one_tier()
    mine = Scope(tenant=b"mine")
    serve(manager, tokens(1), now=1)
    assert say(manager, Retain(tokens=tokens(1), scope=mine, priority=90), 2)[0] == "deferred"
    serve(manager, tokens(1), now=3, scope=mine)
    assert priorities(manager, tokens(1), 4) == [35]
    [block] = manager.lookup(tokens(1), now=4, keep=0, scope=mine).blocks
    assert manager.explain(block, now=4).priority == 90


def test_blocks_go_up_and_down_as_hints_say():
    manager = two_tiers(gpu=8, host=8)
    serve(manager, tokens(2), now=1)
    assert say(manager, Demote(tokens=tokens(2), tier=1), 2) == ("accepted", 2, 0)
    complete_all_moves(manager, 3)
    tiers = [[c.tier for c in b.copies] for b in manager.lookup(tokens(2), now=4, keep=0).blocks]
    assert tiers == [[1], [1]]
    assert say(manager, Prefetch(tokens=tokens(2), deadline=4), 4) == ("rejected", 0, 2)
    assert say(manager, Prefetch(tokens=tokens(2)), 5) == ("accepted", 2, 0)
    complete_all_moves(manager, 6)
    assert manager.acquire(tokens(2), now=7, keep=0).ready()


def test_each_reply_has_a_code_that_no_name_can_forge():
    manager = two_tiers(gpu=8, host=8)
    serve(manager, tokens(4), now=1)
    name = "a quarter of the tier is in flight already"
    late, few = Prefetch(tokens=tokens(4), deadline=9), Prefetch(tokens=tokens(4))
    hints = [
        (Retain(tokens=tokens(4), priority=50), "accepted"),
        (Retain(tokens=tokens(5), priority=40), "waiting"),
        (Release(session=name), "absent"),
        (Demote(tokens=tokens(4)), "accepted"),
    ]
    codes = [manager.hint([hint], now=2)[0].code for hint, _ in hints]
    assert codes == [code for _, code in hints]
    complete_all_moves(manager, 3)
    assert [manager.hint([hint], now=9)[0].code for hint in (late, few)] == ["late", "crowded"]
    assert "code=" in repr(manager.hint([few], now=9)[0])


def test_a_quota_is_a_number_of_blocks_or_a_share():
    manager = one_tier(blocks=4)
    big = Scope(tenant=b"big")
    serve(manager, tokens(1), now=1)
    for stem in range(1, 4):
        serve(manager, tokens(1, start=100 * stem), now=1 + stem, scope=big)
    assert say(manager, Quota(tenant=b"big", blocks=3, share=0.5), 9) == ("accepted", 3, 0)
    manager.acquire([7], now=10)
    assert manager.lookup(tokens(1), now=11, keep=0).tokens == 4
    assert manager.lookup(tokens(1, start=100), now=11, keep=0, scope=big).tokens == 0
    assert say(manager, Quota(tenant=b"big"), 12)[0] == "accepted"
    assert say(manager, Quota(tenant=b"big"), 12)[0] == "rejected"


def test_priorities_survive_the_disk(tmp_path):
    one, two, three = (prompt(seed, 1) for seed in (1, 2, 3))
    with serving(tmp_path) as executor:
        for each in (one, two, three):
            ask(executor, each)
        now = executor.clock()
        hints = [
            Retain(tokens=one, priority=90, owner="agent"),
            Retain(tokens=two, priority=20, ttl=timedelta(seconds=100)),
        ]
        assert {reply.answer for reply in executor.manager.hint(hints, now=now)} == {"accepted"}
        executor.save()
    for later, expected in ((50, [90, 20, 35]), (200, [90, 35, 35])):
        with serving(tmp_path, wall=Clock(WALL + later * SECOND)) as executor:
            assert executor.restore() == 3
            now = executor.clock()
            found = [priorities(executor.manager, each, now, 2)[0] for each in (one, two, three)]
            assert found == expected
            assert kv(one).shape[0] == 4


WRONG = [
    (Retain, "one of tokens, lease, session, not 0"),
    (lambda: Retain(tokens=[1], lease=3), "not 2 of them"),
    (lambda: Retain(tokens=[1], priority=101), "priority is 101, 0 to 100"),
    (lambda: Retain(lease=1, decode_priority=-1), "decode_priority is -1"),
    (lambda: Retain(tokens=[1], ttl=0), "ttl is 0, 1 to"),
    (lambda: Retain(tokens=[1], ttl=timedelta(seconds=-1)), "ttl is -1000000000, 1 to"),
    (lambda: Retain(tokens=[1], start=5, end=4), "from 5 to 4"),
    (Release, "not 0 of them"),
    (lambda: Release(session="s", owner="o"), "not 2 of them"),
    (lambda: Release(session="s", tokens=[1]), "not 2 of them"),
    (Prefetch, "Prefetch is about one"),
    (Demote, "Demote is about one"),
    (lambda: Quota(tenant=b"", share=1.5), "share of a quota is 1.5, 0 to 1"),
    (lambda: Quota(tenant=b"", blocks=-1), "blocks of a quota is -1, 0 to"),
    (lambda: Tier("gpu", blocks=1, retained_share=1.5), "retained_share of tier 'gpu' is 1.5"),
]


@pytest.mark.parametrize(("make", "part"), WRONG)
def test_a_hint_that_cannot_be_is_refused_when_it_is_made(make, part):
    with pytest.raises(ConfigError, match=part):
        make()


@pytest.mark.parametrize(
    ("hint", "error", "part"),
    [
        (Prefetch(tokens=[1], tier="host"), ConfigError, "no tier below it"),
        (Prefetch(tokens=[1], tier="disk"), ConfigError, "no tier 'disk'"),
        (Demote(tokens=[1], tier=0), ConfigError, "no tier above it"),
        (Retain(tokens=[-1]), ConfigError, "token 0 is -1"),
        (Retain(tokens=[1], decode_priority=3), ConfigError, "lease or a session"),
        (Retain(session="s", decode_ttl=3), ConfigError, "without decode_priority"),
        ("keep it", ConfigError, "a hint is a Retain, .*, not 'str'"),
    ],
)
def test_of_hints_of_which_one_is_wrong_none_counts(hint, error, part):
    manager = two_tiers()
    serve(manager, tokens(1), now=1)
    before = manager.snapshot()
    with pytest.raises(error, match=part):
        manager.hint([Retain(tokens=tokens(1), priority=90), hint], now=2)
    assert manager.snapshot() == before


def test_a_flood_of_retained_blocks_makes_no_request_fail():
    manager = BlockManager(MODEL, [Tier("gpu", blocks=8, retained_share=1)], block_tokens=4)
    for stem in range(8):
        serve(manager, tokens(1, start=100 * stem), now=stem)
        say(manager, Retain(tokens=tokens(1, start=100 * stem), priority=100), 10)
    lease = manager.acquire(tokens(8, start=5000), now=20)
    with pytest.raises(NoSpaceError):
        manager.acquire(tokens(1), now=21)
    lease.release(now=22)


def test_a_users_costs_rank_blocks():
    manager = one_tier(blocks=3, cost="python", policy="flat")
    for stem in range(3):
        serve(manager, tokens(1, start=100 * stem), now=10)
    rows = manager.unpriced()
    assert (len(rows), rows.id.dtype, rows.index.tolist()) == (3, np.uint64, [0, 0, 0])
    assert (rows.context.tolist(), rows.uses.tolist()) == ([0] * 3, [1] * 3)
    assert rows.session_blocks.tolist() == [1, 1, 1]
    assert len(manager.unpriced(2)) == 2
    assert repr(rows) == "Unpriced(3 blocks)"
    assert manager.set_costs(rows.id, [3.0, 1.0, 2.0], now=11) == 3
    assert len(manager.unpriced()) == 0
    ranks = [manager.explain(int(block), now=20).rank for block in rows.id]
    assert ranks == [2, 0, 1]
    serve(manager, tokens(1, start=900), now=30)
    assert len(manager.unpriced()) == 1
    # The cheapest has left; its handle names no block.
    assert manager.set_costs(rows.id, np.ones(3), now=31) == 2
    manager.audit()


@pytest.mark.parametrize(
    ("costs", "part"),
    [([1.0], "2 blocks and 1 costs"), ([1.0, math.nan], "cost 1, .* NaN"), ([0.0, 1.0], "is 0:")],
)
def test_costs_that_cannot_be_are_refused(costs, part):
    manager = one_tier(cost="python")
    serve(manager, tokens(2), now=1)
    before = manager.snapshot()
    with pytest.raises(ConfigError, match=part):
        manager.set_costs(manager.unpriced().id, costs, now=2)
    assert manager.snapshot() == before
    with pytest.raises(ConfigError, match="cost='python'"):
        one_tier().unpriced()
