"""Progress hints: the time of a session's next request ranks its blocks and loads them in time."""

from __future__ import annotations

from datetime import timedelta

import numpy as np
import pytest
from serving import MODEL, complete_all_moves, one_tier, serve, tokens

from kvtrie import BlockManager, ConfigError, Demote, Lane, Progress, Scope, Tier

SECOND = 10**9
BLOCK = 4


def found(manager, stem, now):
    return manager.lookup(tokens(2, start=100 * stem), now=now, keep=0).tokens // BLOCK


def two_waiting():
    """A full tier of four blocks that two sessions have, "0" and "1", and a request each second."""
    manager = one_tier(blocks=4, policy="learned")
    for stem in range(2):
        serve(manager, tokens(2, start=100 * stem), now=(stem + 1) * SECOND, session=str(stem))
    return manager


@pytest.mark.parametrize("later", [0, 1])
def test_session_that_comes_later_leaves_first(later):
    manager = two_waiting()
    for stem in range(2):
        eta = timedelta(seconds=900 if stem == later else 3)
        [reply] = manager.hint([Progress(session=str(stem), eta=eta)], now=3 * SECOND)
        assert (reply.answer, reply.blocks, reply.not_applied) == ("accepted", 2, 0)
    serve(manager, tokens(2, start=900), now=4 * SECOND)
    manager.audit()
    assert [found(manager, stem, 5 * SECOND) for stem in range(2)] == [2 * later, 2 * (1 - later)]


@pytest.mark.parametrize("later", [0, 1])
def test_a_new_time_replaces_the_one_before(later):
    manager = two_waiting()
    for stem in range(2):
        manager.hint([Progress(session=str(stem), eta=30 * SECOND)], now=3 * SECOND)
    manager.hint([Progress(session=str(later), eta=900 * SECOND)], now=3 * SECOND)
    serve(manager, tokens(2, start=900), now=4 * SECOND)
    assert [found(manager, stem, 5 * SECOND) for stem in range(2)] == [2 * later, 2 * (1 - later)]


def test_a_path_that_two_sessions_have_waits_for_the_sooner_one():
    manager = two_waiting()
    for name, eta in (("0", 3), ("also 0", 900), ("1", 60)):
        if name == "also 0":
            serve(manager, tokens(2), now=3 * SECOND, session=name)
            # A request of another session used the blocks since: nothing is announced of them.
            manager.hint([Progress(session="0", eta=3 * SECOND)], now=3 * SECOND)
        [reply] = manager.hint([Progress(session=name, eta=eta * SECOND)], now=3 * SECOND)
        clipped = name == "also 0"
        assert (reply.answer, reply.not_applied) == (("clipped", 2) if clipped else ("accepted", 0))
    serve(manager, tokens(2, start=900), now=4 * SECOND)
    assert [found(manager, stem, 5 * SECOND) for stem in range(2)] == [2, 0]


def test_a_reply_says_nothing_of_the_sessions_of_other_tenants():
    manager = one_tier(blocks=8, policy="learned")
    scopes = [Scope(tenant=name, share_after=2) for name in (b"one", b"two")]
    for at, scope in enumerate(scopes):
        serve(manager, tokens(2), now=(at + 1) * SECOND, session="s", scope=scope)
    for scope, eta in zip(scopes, (3, 900), strict=True):
        [reply] = manager.hint(
            [Progress(session="s", eta=eta * SECOND, scope=scope)], now=3 * SECOND
        )
        assert (reply.answer, reply.blocks, reply.not_applied) == ("accepted", 2, 0)


def loading():
    """A session of two blocks, which are on the host alone; a block takes a second up."""
    block = MODEL.block_bytes(BLOCK)
    lanes = {"read": Lane("up", block), "store": Lane("down", 1e12)}
    tiers = [Tier("gpu", blocks=8, write="through"), Tier("host", blocks=8, **lanes)]
    manager = BlockManager(MODEL, tiers, block_tokens=BLOCK, policy="learned")
    serve(manager, tokens(2), now=SECOND, session="0")
    manager.hint([Demote(session="0", tier="host")], now=2 * SECOND)
    complete_all_moves(manager, now=2 * SECOND)
    return manager


def test_blocks_are_loaded_when_the_tool_is_about_to_end():
    manager = loading()
    manager.hint([Progress(session="0", eta=80 * SECOND)], now=10 * SECOND)
    # Twice two seconds and an eighth of the time before.
    manager.hint([], now=75 * SECOND)
    assert not len(manager.moves())
    manager.hint([], now=76 * SECOND)
    moves = manager.moves()
    assert len(moves) == 2
    manager.complete(moves.id, now=78 * SECOND)
    manager.audit()
    manager.hint([], now=79 * SECOND)
    assert not len(manager.moves())


def test_a_tool_that_takes_longer_delays_the_loads():
    manager = loading()
    manager.hint([Progress(session="0", eta=80 * SECOND)], now=10 * SECOND)
    manager.hint([Progress(session="0", eta=800 * SECOND)], now=50 * SECOND)
    manager.hint([], now=100 * SECOND)
    assert not len(manager.moves())
    manager.hint([Progress(session="0", eta=SECOND)], now=101 * SECOND)
    assert len(manager.moves()) == 2


def test_the_next_request_ends_what_was_announced():
    manager = loading()
    manager.hint([Progress(session="0", eta=80 * SECOND)], now=10 * SECOND)
    with manager.acquire(tokens(1, start=700), now=11 * SECOND, session="0", keep=0):
        pass
    manager.hint([], now=90 * SECOND)
    assert not len(manager.moves())


def test_the_lowest_tier_loads_nothing():
    manager = loading()
    hint = Progress(session="0", eta=1, tier="host")
    [reply] = manager.hint([hint], now=10 * SECOND)
    assert (reply.answer, len(manager.moves())) == ("accepted", 0)


def test_an_unknown_session_is_rejected():
    manager = loading()
    for session, scope in (("none", None), ("0", Scope(tenant=b"other"))):
        [reply] = manager.hint([Progress(session=session, eta=1, scope=scope)], now=10 * SECOND)
        assert (reply.answer, reply.code) == ("rejected", "absent")


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ({"eta": -5}, "eta"),
        ({"eta": 2**64}, "eta"),
        ({"eta": None}, "eta"),
        ({"session": None, "eta": 1}, "session"),
        ({"session": 7, "eta": 1}, "session"),
        ({"eta": 1, "scope": b"t"}, "scope"),
    ],
)
def test_a_time_or_a_session_that_cannot_be_is_refused(given, part):
    with pytest.raises(ConfigError, match=part):
        Progress(**{"session": "s", **given})


def test_announced_blocks_explain_themselves():
    manager = two_waiting()
    manager.hint([Progress(session="0", eta=50 * SECOND)], now=3 * SECOND)
    [block, _] = manager.lookup(tokens(2), now=3 * SECOND, keep=0).blocks
    assert "announced 50 requests from now" in manager.explain(block, now=3 * SECOND).words
    assert np.isfinite(manager.explain(block, now=3 * SECOND).value)
