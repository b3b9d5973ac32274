"""One wrong `now`: later calls are served as if it had never been."""

from __future__ import annotations

import numpy as np
import pytest
from serving import MODEL, complete_all_moves, one_tier, serve, tokens
from surface import methods

from kvtrie import BlockManager, ConfigError, Index, Tier
from kvtrie._kvtrie import Lease
from kvtrie.settings.hint import Retain

REQUESTS = 250
SECOND = 10**9
DAY = 24 * 3600 * SECOND
WRONG = [DAY + 5 * REQUESTS * SECOND, 1_800_000_000 * SECOND, 2**63 - 1]


def stored_ahead(lease, now):
    """No engine owns these slots, but the time comes in."""
    with pytest.raises(ConfigError, match="owner"):
        lease.store_ahead(now=now)


def cleared(manager, now):
    """One group has no further copies, but the time comes in."""
    with pytest.raises(ConfigError, match="group"):
        manager.clear_copies([], 0, group=1, now=now)


OF_MANAGER = {
    "acquire": lambda m, _, now: m.acquire(tokens(1), now=now).release(),
    "clear_copies": lambda m, _, now: cleared(m, now),
    "commit_many": lambda m, lease, now: m.commit_many([lease.id], [[]], now=now),
    "complete": lambda m, _, now: m.complete([], now=now),
    "expected_sessions": lambda m, _, now: m.expected_sessions(now=now),
    "evict": lambda m, _, now: m.evict(0, now=now),
    "explain": lambda m, _, now: m.explain(m.lookup(tokens(2), now=0).handles[0], now=now),
    "explain_miss": lambda m, _, now: m.explain_miss(tokens(2), now=now),
    "sort_versions": lambda m, _, now: m.sort_versions([], blocks=9, now=now),
    "flush": lambda m, _, now: m.flush(now=now),
    "hint": lambda m, _, now: m.hint([], now=now),
    "index": lambda m, _, now: m.index(now=now),
    "load_index": lambda m, _, now: m.load_index(Index(), now=now),
    "lookup": lambda m, _, now: m.lookup(tokens(1), now=now).blocks,
    "lookup_many": lambda m, _, now: m.lookup_many([tokens(1)], now=now),
    "mark": lambda m, _, now: m.mark(tokens(1), -1 % 2, present=False, now=now),
    "pin_copies": lambda m, _, now: m.unpin_copies(m.pin_copies([], 0, now=now), now=0),
    "predict": lambda m, _, now: m.predict([], now=now),
    "set_costs": lambda m, _, now: m.set_costs([], [], now=now),
    "transmit": lambda m, _, now: m.transmit("host read", 0, now=now),
    "unpin_copies": lambda m, _, now: m.unpin_copies(m.pin_copies([], 0, now=0), now=now),
}
OF_LEASE = {
    "commit": lambda _, lease, now: lease.commit([], now=now),
    "drop_ahead": lambda _, lease, now: lease.drop_ahead(now=now),
    "fork": lambda _, lease, now: lease.fork(0, now=now),
    "load": lambda _, lease, now: lease.load(now=now),
    "release": lambda _, lease, now: lease.release(now=now),
    "reserve": lambda _, lease, now: lease.reserve(0, now=now),
    "resume": lambda m, lease, now: (lease.suspend(now=m.stats().now), lease.resume(now=now)),
    "store_ahead": lambda _, lease, now: stored_ahead(lease, now),
    "suspend": lambda _, lease, now: lease.suspend(now=now),
    "truncate": lambda _, lease, now: lease.truncate(lease.tokens, now=now),
}
CALLS = OF_MANAGER | OF_LEASE


def test_every_method_that_takes_a_time_is_called_with_a_wrong_one():
    for kind, calls in ((BlockManager, OF_MANAGER), (Lease, OF_LEASE)):
        timed = {name for name, signature in methods(kind).items() if "now" in signature.parameters}
        assert timed == set(calls)


def hit_rate(policy, wrong=None, call=None):
    """The share of wanted blocks that are found: prompts of 1 to 20 blocks, few of them often."""
    tiers = [Tier("gpu", blocks=60), Tier("host", blocks=120)]
    manager = BlockManager(MODEL, tiers, block_tokens=4, policy=policy, cost="python")
    draw = np.random.default_rng(3)
    sizes = draw.integers(1, 21, 99).tolist()
    prompts = [tokens(size, start=1000 * at) for at, size in enumerate(sizes)]
    for at, which in enumerate(draw.zipf(1.3, REQUESTS) % len(prompts)):
        now = at * SECOND
        serve(manager, np.append(prompts[which], 7), now=now)
        if wrong is not None and at == REQUESTS // 3:
            with manager.acquire(tokens(1), now=now) as lease:
                complete_all_moves(manager, now)
                lease.commit(tokens(1)[lease.matched :], now=now)
                CALLS[call](manager, lease, wrong)
                complete_all_moves(manager, now)
    stats = manager.stats()
    assert stats.now < REQUESTS * SECOND
    manager.audit()
    return sum(tier.hits for tier in stats.tiers.values()) / stats.blocks_wanted


@pytest.mark.parametrize("policy", ["lru", "retention"])
def test_hits_after_one_wrong_time_are_those_of_the_run_without(policy):
    right = hit_rate(policy)
    assert 0.3 < right < 0.95
    for at, call in enumerate(CALLS):
        rate = hit_rate(policy, WRONG[at % len(WRONG)], call)
        assert rate == pytest.approx(right, abs=0.01), call


def test_one_wrong_time_ends_no_hint_and_readies_no_mark():
    manager = one_tier()
    serve(manager, tokens(2), now=5)
    manager.hint([Retain(tokens=tokens(2), priority=80, ttl=DAY // 2)], now=5)
    manager.mark(tokens(1, start=100), 0, present=True, ready=DAY // 2, now=5)
    manager.flush(now=WRONG[1])
    manager.flush(now=6)
    stats = manager.stats()
    assert (stats.now, stats.doubted, stats.clamped) == (6, 1, 0)
    (kept, _), (coming,) = (
        manager.lookup(tokens(2, start=at), now=7, keep=0).blocks for at in (0, 100)
    )
    assert manager.explain(kept, now=7).priority == 80
    assert coming.copies[0].ready == DAY // 2


def test_a_server_that_idled_for_a_weekend_is_one_call_late():
    manager = one_tier()
    serve(manager, tokens(2), now=SECOND)
    monday = 3 * DAY
    lease = manager.acquire(tokens(2), now=monday)
    assert manager.stats().now == SECOND
    lease.release()
    manager.acquire(tokens(2), now=monday + SECOND).release()
    assert (manager.stats().now, manager.stats().doubted) == (monday + SECOND, 1)


def test_reset_forgets_the_time():
    manager = one_tier()
    serve(manager, tokens(2), now=WRONG[2])
    manager.reset()
    serve(manager, tokens(2), now=SECOND)
    assert (manager.stats().now, manager.stats().clamped) == (SECOND, 0)
