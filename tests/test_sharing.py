"""Sharing after a number of tenants, through the Python API."""

from __future__ import annotations

import pytest

from kvtrie import BlockManager, ConfigError, ModelShape, Scope, Tier
from kvtrie.settings.hint import Demote, Release, Retain

SHAPE = ModelShape(layers=2, kv_heads=2, head_dim=4, fingerprint="shared")
PROMPT = list(range(12))


def make_manager(*tiers, secret=None):
    return BlockManager(SHAPE, tiers or [Tier("gpu", blocks=16)], block_tokens=4, secret=secret)


def tenant(number, after=3):
    return Scope(tenant=b"tenant %d" % number, share_after=after)


def serve(manager, scope, prompt=PROMPT, now=1):
    with manager.acquire(prompt, now=now, scope=scope, keep=0, load="none") as lease:
        lease.commit(prompt[lease.matched :], now=now)
        return lease.matched


def matched(manager, number, after=3):
    return manager.lookup(PROMPT, now=9, scope=tenant(number, after), keep=0).tokens


def test_a_prompt_is_shared_once_three_tenants_have_computed_it():
    manager = make_manager()
    assert [serve(manager, tenant(number)) for number in (0, 0, 1, 2, 3)] == [0, 12, 0, 0, 12]
    assert manager.stats().tiers["gpu"].free == 13  # one copy


def test_the_largest_number_counts():
    manager = make_manager()
    serve(manager, tenant(0, 3))
    serve(manager, tenant(1, 2))
    assert matched(manager, 2, 2) == 0
    serve(manager, tenant(2, 2))
    assert matched(manager, 3, 2) == 12


def test_tenants_share_with_no_other_scope():
    manager = make_manager()
    for number in range(3):
        serve(manager, tenant(number))
    for scope in (None, Scope(tenant=b"tenant 0"), Scope(lora="a"), tenant(0)):
        found = manager.lookup(PROMPT, now=9, scope=scope, keep=0).tokens
        assert found == (12 if scope == tenant(0) else 0)


def test_sessions_and_owners_are_apart():
    manager = make_manager()
    for number in (0, 1):
        with manager.acquire(
            PROMPT, now=1, scope=tenant(number), session="s", keep=0, load="none"
        ) as lease:
            lease.commit(PROMPT[lease.matched : 4 + 4 * number], now=1)
            assert lease.session == "s"
    assert [manager.sessions(scope=tenant(number))[0][:2] for number in (0, 1)] == [
        ("s", 1),
        ("s", 2),
    ]
    retain = Retain(tokens=PROMPT, priority=80, owner="o", scope=tenant(0))
    manager.hint([retain], now=2)
    (reply,) = manager.hint([Release(owner="o", scope=tenant(1))], now=3)
    assert reply.answer == "rejected"


def test_replies_do_not_depend_on_other_tenants():
    replies = []
    for others in (False, True):
        manager = make_manager(Tier("gpu", blocks=16), Tier("host", blocks=16))
        serve(manager, tenant(0))
        if others:
            serve(manager, tenant(1))
        hints = [
            Retain(tokens=PROMPT, priority=10, scope=tenant(0)),
            Release(tokens=PROMPT, scope=tenant(0)),
            Demote(tokens=PROMPT, tier="host", scope=tenant(0)),
        ]
        replies.append([str(reply) for reply in manager.hint(hints, now=2)])
        assert manager.explain_miss(PROMPT, now=2, scope=tenant(2)).diverged_at is None
    assert replies[0] == replies[1]


@pytest.mark.parametrize("kind", ["disk", "remote"])
def test_tiers_that_outlive_the_manager_need_a_secret(kind, tmp_path):
    path = str(tmp_path) if kind == "disk" else f"folder:{tmp_path}"
    tiers = [Tier("gpu", blocks=4), Tier("host", blocks=4), Tier(kind, blocks=8, path=path)]
    with pytest.raises(ConfigError, match="needs a secret"):
        serve(make_manager(*tiers), tenant(0))
    serve(make_manager(*tiers, secret=b"s"), tenant(0))


def test_producers_are_kept_with_the_blocks_on_disk():
    tiers = [Tier("gpu", blocks=4), Tier("disk", blocks=8)]
    first = make_manager(*tiers, secret=b"s")
    serve(first, tenant(0))
    for number in (1, 2):
        serve(first, tenant(number), PROMPT[:4])
    first.flush(now=4)
    while len(moves := first.moves()):
        first.complete(moves.id, now=5)
    rows = first.index("disk", now=6)
    again = make_manager(*tiers, secret=b"s")
    again.load_index(rows, now=1)
    assert [matched(again, number) for number in range(4)] == [12, 4, 4, 4]
    for secret, found in ((b"another", 4), (None, 0)):
        other = make_manager(*tiers, secret=secret)
        other.load_index(rows, now=1)
        if secret is None:
            assert other.stats().tiers["disk"].free == 8
        else:
            assert [matched(other, number) for number in range(2)] == [found, found]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Scope(tenant=b"t", share_after=1), "share_after is 1, 2 to 32"),
        (lambda: Scope(tenant=b"t", share_after=33), "share_after is 33"),
        (lambda: Scope(tenant=b"t", share_after="3"), "share_after is '3'"),
        (lambda: Scope(share_after=3), "share_after is 3 in a scope without a tenant"),
        (lambda: make_manager(secret=""), "secret is of type"),
        (lambda: make_manager(secret=b""), "secret is empty"),
        (
            lambda: make_manager().lookup([1], now=0, scope=Scope(tenant=b"kvtrie share_after")),
            "is reserved",
        ),
    ],
)
def test_bad_input_is_refused(make, said):
    with pytest.raises(ConfigError, match=said):
        make()
