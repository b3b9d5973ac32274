"""The native classes as an engine uses them: every method once, with what it promises."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from serving import MODEL, complete_all_moves, demoting, one_tier, serve, tokens, two_tiers

from kvtrie import (
    BlockManager,
    ClosedError,
    ConfigError,
    InvariantError,
    Match,
    NoSpaceError,
    Scope,
    Tier,
)


def test_a_lookup_tells_where_blocks_are_and_changes_nothing():
    manager = two_tiers(gpu=2)
    serve(manager, tokens(2), now=1)
    serve(manager, tokens(1, start=100), now=2)
    before = manager.snapshot()
    found = manager.lookup(tokens(2), now=5, keep=0)
    assert manager.snapshot() == before
    assert isinstance(found, Match)
    assert found.tokens == 8
    assert found.handles.dtype == np.uint64
    first, second = found.blocks
    assert (first.block, second.block) == tuple(found.handles)
    assert first.tokens.tolist() == [0, 1, 2, 3]
    assert [copy.tier for copy in first.copies] == [0]
    [copy] = second.copies
    assert (copy.tier, copy.layer_lo, copy.layer_hi) == (1, 0, 4)
    assert (copy.coming_lo, copy.coming_hi, copy.first, copy.ready) == (0, 4, 5, 5)
    assert copy.slots.tolist() == [copy.slot]
    assert manager.lookup(tokens(2), now=5).tokens == 4
    assert manager.lookup(tokens(2), now=5, keep=100).tokens == 0


def test_many_lookups_in_one_call():
    manager = one_tier()
    serve(manager, tokens(3), now=1)
    found = manager.lookup_many([tokens(3), [0, 1, 2, 3, 9], []], now=2, keep=0)
    assert [match.tokens for match in found] == [12, 4, 0]
    assert manager.lookup_many([], now=2) == []
    assert [match.tokens for match in manager.lookup_many([tokens(3)] * 2, now=2)] == [8, 8]
    elsewhere = manager.lookup_many([tokens(3)], now=2, scope=Scope(tenant=b"other"))
    assert [match.tokens for match in elsewhere] == [0]


@pytest.mark.parametrize("count", [3, 20_000])  # within the interpreter's lock, and without it
def test_many_lookups_are_those_of_one_by_one(count):
    manager = one_tier()
    serve(manager, tokens(3), now=1)
    asked = [np.asarray(tokens(at % 5), dtype=np.uint32) for at in range(count)]
    found = manager.lookup_many(asked, now=2)
    alone = [manager.lookup(one, now=2) for one in asked[:5]]
    for at, match in enumerate(found):
        assert match.tokens == alone[at % 5].tokens
        assert match.handles.tolist() == alone[at % 5].handles.tolist()


LONG = np.arange(8000, dtype=np.uint32) + np.uint32(2**31 - 6000)


@pytest.mark.parametrize("dtype", [np.uint32, np.int32, np.int64, np.uint64])
@pytest.mark.parametrize("scope", [Scope(), Scope(extra=((5, b"image"),))])
def test_a_long_prompt_is_found_whatever_its_tokens_are_held_in(dtype, scope):
    manager = one_tier(2000)
    prompt = LONG[:6000]
    manager.acquire(prompt, now=1, scope=scope, reserve=0).commit(prompt, now=1)
    for length, other in ((6000, None), (5996, None), (6000, 4501), (5000, 3)):
        asked = prompt[:length].copy()
        if other is not None:
            asked[other] += 1
        wanted = manager.lookup(asked, now=2, scope=scope)
        found = manager.lookup(asked.astype(dtype), now=2, scope=scope)
        known = (length - 1 if other is None else other) // 4
        assert (found.tokens, wanted.tokens) == (4 * known, 4 * known)
        assert found.handles.tolist() == wanted.handles.tolist()


@pytest.mark.parametrize("at", [0, 4400, 5999, 7999])
@pytest.mark.parametrize(
    ("dtype", "wrong"), [(np.int32, -1), (np.int64, -7), (np.int64, 2**32 + 5)]
)
def test_a_long_lookup_names_the_number_that_is_no_token(dtype, wrong, at):
    manager = one_tier(2000)
    prompt = np.full(6000, 2**32 - 1, dtype=np.uint32)  # -1 as an unsigned token
    manager.acquire(prompt, now=1, reserve=0).commit(prompt, now=1)
    asked = np.full(8000, 5, dtype=dtype)
    asked[at] = wrong
    with pytest.raises(ConfigError, match=f"token {at} is {wrong}, 0 to"):
        manager.lookup(asked, now=2)
    if wrong == -1:
        asked[: at + 1] = -1
        with pytest.raises(ConfigError, match="token 0 is -1"):
            manager.lookup(asked, now=2)


@pytest.mark.parametrize("wrong", [[[1], [-1]], [[1], [2**32]], [1, 2], None])
def test_many_lookups_refuse_what_one_refuses(wrong):
    manager = one_tier()
    serve(manager, tokens(3), now=1)
    before = manager.snapshot()
    with pytest.raises((ConfigError, TypeError)):
        manager.lookup_many(wrong, now=2)
    assert manager.snapshot() == before


def test_a_block_that_is_gone_has_no_copies_any_more():
    manager = one_tier(blocks=1)
    serve(manager, tokens(1), now=1)
    found = manager.lookup(tokens(1), now=2, keep=0)
    serve(manager, tokens(1, start=50), now=3)
    assert found.tokens == 4
    [block] = found.blocks
    assert (len(block.tokens), block.copies) == (0, ())
    with pytest.raises(ConfigError, match="not cached"):
        manager.explain(block, now=4)


def test_scopes_never_match_each_other():
    manager = one_tier(blocks=32)
    scopes = [
        None,
        Scope(tenant=b"a"),
        Scope(lora="a"),
        Scope(tenant=b"a", lora="a"),
        Scope(extra=((2, b"image"),)),
        Scope(extra=((2, b"other"),)),
    ]
    for scope in scopes:
        assert manager.lookup(tokens(2), now=1, scope=scope, keep=0).tokens == 0
        serve(manager, tokens(2), now=1, scope=scope)
    for scope in scopes:
        assert manager.lookup(tokens(2), now=2, scope=scope, keep=0).tokens == 8
    assert manager.stats().blocks == 12
    with pytest.raises(ConfigError, match="leaf-only"):
        manager.lookup(tokens(2), now=2, scope=Scope(structure="holes"))


def test_a_request_from_acquire_to_release():
    manager = one_tier()
    prompt = np.arange(10)
    with manager.acquire(prompt, now=1, reserve=3, session="chat") as lease:
        assert (lease.state, lease.session, lease.matched, lease.tokens) == (
            "active",
            "chat",
            0,
            0,
        )
        table = lease.slots(0)
        assert (table.dtype, len(set(table.tolist()))) == (np.uint32, 4)
        assert np.array_equal(lease.slots("gpu"), table)
        assert (lease.ready(), lease.room) == (True, 16)
        done = lease.commit(prompt, now=2)
        assert (len(done.new), len(done.duplicate), len(done.canonical)) == (2, 0, 0)
        assert (lease.tokens, lease.room) == (10, 6)
        assert lease.commit([10], now=3).new.size == 0
        assert lease.commit((11,), now=4).new.size == 1
        assert manager.lease(lease.id).tokens == 12
    assert lease.state == "released"
    assert lease.release().size == 0
    [(name, length, path)] = manager.sessions()
    assert (name, length, path.dtype) == ("chat", 3, np.uint64)
    assert path.tolist() == manager.lookup(range(12), now=5, keep=0).handles.tolist()
    again = manager.acquire(range(12), now=5)
    assert again.matched == 8
    assert again.plan.spans[0].action == "reuse"


def test_a_released_lease_is_closed():
    manager = one_tier()
    lease = manager.acquire(tokens(1), now=1)
    lease.release(now=1)
    uses = [
        lambda: lease.plan,
        lambda: lease.matched,
        lambda: lease.tokens,
        lambda: lease.room,
        lambda: lease.after,
        lambda: lease.session,
        lease.ready,
        lease.slots,
        lambda: lease.reserve(1, now=1),
        lambda: lease.bind(0, [1]),
        lambda: lease.load(now=1),
        lambda: lease.commit([1], now=1),
        lambda: lease.truncate(0, now=1),
        lambda: lease.fork(1, now=1),
        lambda: lease.suspend(now=1),
        lambda: lease.resume(now=1),
        lambda: manager.lease(lease.id),
        lambda: manager.commit_many([lease.id], [1], now=1),
    ]
    for use in uses:
        with pytest.raises(ClosedError, match=f"lease {lease.id}"):
            use()
    assert repr(lease) == f"Lease(id={lease.id}, released)"


def test_room_is_all_or_nothing_and_the_error_has_the_numbers():
    manager = one_tier(blocks=4)
    held = manager.acquire(tokens(3), now=1)
    before = manager.snapshot()
    with pytest.raises(NoSpaceError) as caught:
        manager.acquire(tokens(2, start=50), now=2)
    assert manager.snapshot() == before
    error = caught.value
    assert (error.tier, error.wanted, error.free, error.coming, error.leased) == (
        "gpu",
        2,
        1,
        0,
        3,
    )
    assert "wanted 2" in str(error)
    with pytest.raises(NoSpaceError):
        held.reserve(100, now=2)
    held.reserve(13, now=2)
    assert held.room == 16


def test_a_duplicate_is_told():
    manager = one_tier()
    one = manager.acquire(tokens(1), now=1, reserve=4)
    two = manager.acquire(tokens(1), now=1, reserve=4)
    own = two.slots(0)[0]
    won = one.commit(tokens(1), now=2).new
    committed = two.commit(tokens(1), now=2)
    assert committed.new.size == 0
    assert committed.duplicate.tolist() == [own]
    assert committed.canonical.tolist() == won.tolist()


def test_fork_truncate_and_the_copy_before_a_write():
    manager = one_tier()
    lease = manager.acquire([1, 2], now=1, reserve=8)
    lease.commit([1, 2], now=1)
    (fork,) = lease.fork(1, now=2)
    assert (fork.id != lease.id, fork.tokens, fork.room) == (True, 2, 0)
    assert lease.fork(0, now=2) == []
    fork.reserve(2, now=3)
    moves = manager.moves()
    [move] = list(moves)
    assert (move.kind, move.tokens, move.lease) == (2, 2, fork.id)
    assert move.block == 2**64 - 1
    assert fork.after.tolist() == [move.id]
    with pytest.raises(ConfigError, match="awaits"):
        fork.commit([3], now=3)
    manager.complete(moves.id, now=4)
    fork.commit([3, 4], now=4)
    assert fork.tokens == 4
    fork.truncate(1, now=5)
    assert (fork.tokens, lease.tokens) == (1, 2)
    with pytest.raises(ConfigError, match="holds 1"):
        fork.truncate(2, now=5)


def test_suspend_and_resume():
    manager = two_tiers(gpu=4, host=4)
    lease = manager.acquire(tokens(3), now=1, session="chat")
    lease.commit(tokens(3), now=1)
    lease.suspend(now=2)
    complete_all_moves(manager, 3)
    assert (lease.state, lease.tokens, lease.session) == ("suspended", 12, "chat")
    with pytest.raises(ClosedError, match="suspended"):
        lease.commit([1], now=3)
    with pytest.raises(ConfigError, match="'disk'"), manager.acquire([7], now=3) as other:
        other.suspend("disk", now=3)
    plan = lease.resume(4, now=4)
    assert lease.state == "active"
    assert {span.action for span in plan.spans} <= {"load", "recompute", "reuse"}
    complete_all_moves(manager, 5)
    lease.commit(tokens(3)[lease.matched :], now=6)
    assert lease.tokens == 12
    with pytest.raises(ConfigError, match="not suspended"):
        lease.resume(now=6)


def test_commit_many_is_all_or_nothing():
    manager = one_tier(blocks=16)
    leases = [manager.acquire([0], now=1, reserve=7) for _ in range(3)]
    ids = np.array([lease.id for lease in leases], dtype=np.uint64)
    done = manager.commit_many(ids, np.array([5, 6, 7], dtype=np.int32), now=1)
    assert [len(committed.new) for committed in done] == [0, 0, 0]
    manager.commit_many(ids.tolist(), [1, 2, 3], now=2)
    done = manager.commit_many(ids, [[1, 2], np.array([3]), (4, 5, 6)], now=3)
    assert [len(committed.new) for committed in done] == [1, 0, 1]
    assert [lease.tokens for lease in leases] == [4, 3, 5]
    before = manager.snapshot()
    for bad in ([[1], [1]], [[1] * 9, [1], [1]]):
        with pytest.raises(ConfigError):
            manager.commit_many(ids, bad, now=4)
    with pytest.raises(ConfigError, match="twice"):
        manager.commit_many([leases[0].id] * 2, [1, 2], now=4)
    assert manager.snapshot() == before


def test_an_explanation_is_the_product_of_its_terms():
    manager = one_tier(policy="weighted", cost="seed")
    serve(manager, tokens(4), now=0, session="chat")
    blocks = manager.lookup(tokens(4), now=0, keep=0).blocks
    for at, block in enumerate(blocks):
        explained = manager.explain(block, now=2 * 10**9)
        assert explained.weights["position"] == (at + 1) / 4
        weights = explained.weights
        product = explained.terms["base"] * weights["layer"] * weights["position"]
        assert explained.cost == pytest.approx(product)
        assert explained.value == pytest.approx(explained.cost / 2)
        assert (explained.idle, explained.layers) == (2 * 10**9, (0, 4))
        assert explained.rank == (0 if at == 3 else None)  # leaf-only: only the last may leave
        one = manager.explain(block.block, now=2 * 10**9, layer=3)
        assert one.cost == pytest.approx(manager.cost(3, at, 4, 4 * at))
        assert (one.weights["layer"], one.layers) == (0.25, (3, 4))
    assert manager.explain(blocks[3], now=0).value == float("inf")
    with pytest.raises(ConfigError, match="block 4 of 4"):
        manager.cost(0, 4, 4, 0)


def test_counters_and_events():
    manager = two_tiers(gpu=2, host=2, events=3)
    for at in range(4):
        serve(manager, tokens(2, start=100 * at), now=10 + at)
    assert manager.lookup(tokens(2), now=5).tokens == 0
    serve(manager, tokens(1), now=5)
    stats = manager.stats()
    assert (stats.leases, stats.moves, stats.queued, stats.clamped) == (0, 0, 0, 4)
    gpu, host = stats.tiers["gpu"], stats.tiers["host"]
    assert (gpu.slots, host.slots, stats.inserted, stats.tokens_wanted) == (2, 2, 9, 36)
    assert host.bytes_written == host.moves * MODEL.block_bytes(4) > 0
    events = manager.take_events()
    assert len(events) == 3
    assert {event.reason for event in events} == {"demoted", "dropped"}
    demoted = next(event for event in events if event.reason == "demoted")
    assert (demoted.tier, demoted.to, demoted.layer_lo, demoted.layer_hi) == (0, 1, 0, 4)
    assert (demoted.kind, demoted.number, demoted.key, demoted.tokens) == ("removed", *[None] * 3)
    assert manager.take_events() == []


def test_events_of_residency():
    manager = two_tiers(gpu=2, host=2, events=100, events_of="residency")
    serve(manager, tokens(2), now=1)
    first, second = manager.take_events()
    assert [(event.kind, event.at, event.tier) for event in (first, second)] == [
        ("stored", 1, 0)
    ] * 2
    assert (first.layer_lo, first.layer_hi, first.reason, first.idle) == (0, 4, None, None)
    assert (first.tokens, second.tokens) == (list(range(4)), list(range(4, 8)))
    assert (len(first.key), second.parent, first.number, second.number) == (32, first.key, 0, 1)
    # Both go to host: a copy that leaves is gone, and arrives below when its move has ended.
    serve(manager, tokens(2, start=100), now=2)
    events = manager.take_events()
    keys = {first.key: "first", second.key: "second"}
    said = [(event.kind, keys.get(event.key, "new"), event.tier) for event in events]
    assert said[:2] == [("removed", "second", 0), ("removed", "first", 0)]
    assert sorted(said[2:]) == [
        *[("stored", whose, tier) for whose, tier in [("first", 1), ("new", 0), ("new", 0)]],
        ("stored", "second", 1),
    ]
    assert [event.number for event in events] == list(range(2, 8))
    assert repr(events[0]).startswith("Event(kind='removed', at=2, block=0x")
    # The same tokens have the same keys in another manager.
    other = two_tiers(gpu=2, host=2, events=100, events_of="residency")
    serve(other, tokens(2), now=1)
    assert [event.key for event in other.take_events()] == [first.key, second.key]
    # Forgotten blocks have left.
    manager.reset()
    left = manager.take_events()
    assert [event.kind for event in left] == ["removed"] * 4


def test_equal_operations_give_equal_states():
    def run():
        manager = two_tiers(structure="holes")
        for at in range(9):
            serve(manager, tokens(2, start=8 * (at * at % 5)), now=at)
        return manager.snapshot()

    first = run()
    assert first == run()
    assert first != two_tiers(structure="holes").snapshot()


def test_everything_has_a_useful_repr():
    manager, lease = demoting()
    found = manager.lookup(tokens(1), now=2, keep=0)
    moves = manager.moves()
    said = {
        manager: "BlockManager(gpu 0/2 free, host 6/8 free; blocks=2, leases=1)",
        lease: f"Lease(id={lease.id}, active, matched=0, tokens=0)",
        lease.plan: "Plan(reuse=0, load=0, recompute=0",
        found: "Match(tokens=4, blocks=1)",
        found.blocks[0]: "MatchedBlock(block=0x",
        moves: "Moves(2: load=0, store=2, copy=0)",
        moves[0]: "store, tier 0 slot",
    }
    for value, words in said.items():
        assert words in repr(value)


def test_attributes_are_what_was_given():
    tiers = (Tier("gpu", blocks=2), Tier("host", blocks=2))
    manager = BlockManager(MODEL, iter(tiers), block_tokens=8, machine=3)
    assert manager.model is MODEL
    assert manager.tiers == tiers
    assert (manager.block_tokens, manager.machine) == (8, 3)
    assert {"lru", "flat", "retention", "weighted", "checkerboard"} <= set(manager.policies())


def test_results_cannot_be_changed():
    manager, lease = demoting()
    for value, name in [(manager, "machine"), (lease, "id"), (manager.moves(), "id")]:
        with pytest.raises(AttributeError):
            setattr(value, name, 1)
    with pytest.raises(TypeError):
        type(lease)()


def test_reset_wants_nothing_held():
    manager = one_tier()
    lease = manager.acquire(tokens(1), now=1)
    with pytest.raises(ConfigError, match="1 leases"):
        manager.reset()
    lease.commit(tokens(1), now=1)
    lease.release()
    manager.reset()
    assert manager.stats().blocks == 0
    assert manager.acquire(tokens(1), now=2).id > lease.id


def test_a_closed_manager_stays_closed():
    manager = one_tier()
    lease = manager.acquire(tokens(1), now=1)
    manager.close()
    manager.close()
    assert lease.release().size == 0
    for call in (
        lambda: manager.lookup([1], now=1),
        lambda: manager.acquire([1], now=1),
        lambda: manager.complete([], now=1),
        manager.moves,
        manager.failed,
        manager.reset,
        lease.slots,
    ):
        with pytest.raises(ClosedError):
            call()


def test_an_exception_inside_a_with_block_releases_the_lease():
    manager = one_tier()

    def fail():
        with manager.acquire(tokens(1), now=1):
            raise InvariantError

    with pytest.raises(InvariantError):
        fail()
    assert manager.stats().leases == 0


def test_threads_share_one_manager():
    manager = two_tiers(gpu=64, host=64)
    wrong = []

    def work(number):
        try:
            for at in range(60):
                prompt = tokens(3, start=1000 * (at % 7) + 100_000 * (number % 2))
                with manager.acquire(prompt, now=at, reserve=4) as lease:
                    moves = manager.moves()
                    manager.complete(moves.id, now=at)
                    if lease.ready():
                        lease.commit(prompt[lease.matched :], now=at)
                manager.lookup_many([prompt] * 3, now=at)
                manager.snapshot()
        except Exception as error:  # noqa: BLE001 - a thread must not lose its error
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    complete_all_moves(manager, 100)
    assert manager.stats().leases == 0
    manager.audit()
