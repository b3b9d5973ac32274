"""The native classes as an engine uses them: every method once, with what it promises."""

from __future__ import annotations

import array
import pickle
import threading

import numpy as np
import pytest

from kvtrie import (
    BlockManager,
    ClosedError,
    ConfigError,
    InvariantError,
    Lane,
    Match,
    ModelShape,
    Moves,
    NoSpaceError,
    Scope,
    Tier,
    Transmission,
)

MODEL = ModelShape(layers=4, kv_heads=2, head_dim=8)
ABSENT = 2**32 - 1


def one_tier(blocks=8, **settings):
    return BlockManager(MODEL, [Tier("gpu", blocks=blocks)], block_tokens=4, **settings)


def two_tiers(gpu=4, host=8, *, layer_slots=False, **settings):
    tiers = [
        Tier("gpu", blocks=gpu, layer_slots=layer_slots),
        Tier("host", blocks=host, layer_slots=layer_slots),
    ]
    return BlockManager(MODEL, tiers, block_tokens=4, **settings)


def tokens(blocks, start=0):
    return np.arange(start, start + 4 * blocks, dtype=np.uint32)


def serve(manager, prompt, now, **asked):
    """A whole request: acquire, commit, release, with all moves carried out."""
    lease = manager.acquire(prompt, now=now, **asked)
    settle(manager, now)
    lease.commit(prompt[lease.matched :], now=now)
    lease.release(now=now)
    settle(manager, now)


def settle(manager, now):
    while len(moves := manager.moves()):
        manager.complete(moves.id, now=now)


# ------------------------------------------------------------------------------------ tokens


class Tensor:
    """Stands for a CPU tensor: all that is known of it is `__array__`."""

    def __init__(self, values):
        self.values = values

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.values, dtype=dtype)


IDS = list(range(12))


@pytest.mark.parametrize(
    "given",
    [
        IDS,
        tuple(IDS),
        range(12),
        [np.int64(token) for token in IDS],
        *(np.array(IDS, dtype=kind) for kind in "bBhHiIlLqQ"),
        np.array(IDS, dtype=np.int64)[::-1][::-1],
        np.repeat(np.array(IDS, dtype=np.uint32), 2)[::2],
        np.repeat(np.array(IDS, dtype=np.int32), 2)[::2],
        array.array("I", IDS),
        array.array("q", IDS),
        memoryview(array.array("i", IDS)),
        memoryview(np.array(IDS, dtype=np.uint32)),
        memoryview(np.array(IDS, dtype=np.int64))[::1],
        Tensor(IDS),
    ],
    ids=lambda given: f"{type(given).__name__}-{getattr(given, 'dtype', '')}",
)
def test_tokens_come_in_as_any_sequence_of_integers(given):
    manager = one_tier()
    serve(manager, np.array(IDS), now=1)
    assert manager.lookup(given, now=2, keep=0).tokens == 12
    lease = manager.acquire(given, now=3, keep=0)
    assert lease.matched == 12


def test_a_tensor_comes_in():
    torch = pytest.importorskip("torch")
    manager = one_tier()
    serve(manager, np.array(IDS), now=1)
    for dtype in (torch.int64, torch.int32, torch.uint8):
        assert manager.lookup(torch.tensor(IDS, dtype=dtype), now=2, keep=0).tokens == 12
    with pytest.raises(ConfigError, match="float32"):
        manager.lookup(torch.ones(4), now=2)


def test_tokens_of_the_whole_range_are_told_apart():
    manager = one_tier()
    high = np.full(4, 2**32 - 1, dtype=np.uint64)
    serve(manager, high, now=1)
    assert manager.lookup(high, now=2, keep=0).tokens == 4
    assert manager.lookup(high - 1, now=2, keep=0).tokens == 0
    block = manager.lookup([2**32 - 1] * 4, now=2, keep=0).blocks[0]
    assert block.tokens.tolist() == [2**32 - 1] * 4


def test_no_tokens_at_all():
    manager = one_tier()
    for nothing in ([], (), np.array([]), np.array([], dtype=np.int64)):
        assert manager.lookup(nothing, now=1).tokens == 0
    lease = manager.acquire([], now=1, reserve=1)
    assert (lease.matched, len(lease.slots())) == (0, 1)


# ------------------------------------------------------------------------------------- lookup


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
    assert manager.stats()["blocks"] == 12
    with pytest.raises(ConfigError, match="leaf-only"):
        manager.lookup(tokens(2), now=2, scope=Scope(structure="holes"))


# ------------------------------------------------------------------------------------- leases


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
    told = two.commit(tokens(1), now=2)
    assert told.new.size == 0
    assert told.duplicate.tolist() == [own]
    assert told.canonical.tolist() == won.tolist()


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
    settle(manager, 3)
    assert (lease.state, lease.tokens, lease.session) == ("suspended", 12, "chat")
    with pytest.raises(ClosedError, match="suspended"):
        lease.commit([1], now=3)
    with pytest.raises(ConfigError, match="'disk'"), manager.acquire([7], now=3) as other:
        other.suspend("disk", now=3)
    plan = lease.resume(4, now=4)
    assert lease.state == "active"
    assert {span.action for span in plan.spans} <= {"load", "recompute", "reuse"}
    settle(manager, 5)
    lease.commit(tokens(3)[lease.matched :], now=6)
    assert lease.tokens == 12
    with pytest.raises(ConfigError, match="not suspended"):
        lease.resume(now=6)


def test_commit_many_is_all_or_nothing():
    manager = one_tier(blocks=16)
    leases = [manager.acquire([], now=1, reserve=8) for _ in range(3)]
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


# -------------------------------------------------------------------------------------- moves


def demoting():
    """A manager in which the second request has just made room for itself."""
    manager = two_tiers(gpu=2)
    serve(manager, tokens(2), now=1)
    lease = manager.acquire(tokens(2, start=100), now=2)
    return manager, lease


def test_moves_are_columns():
    manager, lease = demoting()
    moves = manager.moves()
    assert len(manager.moves()) == 0
    assert len(moves) == 2
    dtypes = {
        "id": "u8",
        "kind": "u1",
        "lease": "u8",
        "block": "u8",
        "src": "u1",
        "dst": "u1",
        "src_slot": "u4",
        "dst_slot": "u4",
        "group": "u1",
        "layer_lo": "u2",
        "layer_hi": "u2",
        "after": "u8",
        "tokens": "u4",
    }
    for name, dtype in dtypes.items():
        column = getattr(moves, name)
        assert (column.dtype, column.shape) == (np.dtype(dtype), (2,)), name
        assert column.tolist() == [getattr(move, name) for move in moves], name
    assert (moves.key.dtype, moves.key.shape, moves.key.any()) == (np.uint8, (2, 32), False)
    assert moves.kind.tolist() == [1, 1]
    assert (moves.src.tolist(), moves.dst.tolist()) == ([0, 0], [1, 1])
    assert (moves.layer_lo.tolist(), moves.layer_hi.tolist()) == ([0, 0], [4, 4])
    assert (moves[0], moves[-1]) == tuple(moves)
    with pytest.raises(IndexError, match="move 2 of 2"):
        moves[2]
    assert sorted(lease.after.tolist()) == sorted(moves.id.tolist())
    assert not lease.ready()
    first, ready = manager.predict(moves.id, now=3)
    assert (first <= ready).all()
    assert (ready > 3).all()
    assert manager.complete(moves.id, now=4) == 2
    assert manager.complete(moves.id, now=4) == 0
    assert [times.tolist() for times in manager.predict(moves.id, now=9)] == [[9, 9], [9, 9]]
    with pytest.raises(ConfigError, match="no move 99"):
        manager.predict([99], now=9)
    assert lease.ready()


def test_moves_travel_as_bytes():
    manager, _ = demoting()
    moves = manager.moves()
    data = moves.to_bytes()
    for again in (Moves.from_bytes(data), pickle.loads(pickle.dumps(moves))):  # noqa: S301
        assert list(again) == list(moves)
        assert again.to_bytes() == data
    assert data[:12] == b"kvtrmove\x01\0\0\0"
    assert np.frombuffer(data, "<u8", 2, offset=24).tolist() == moves.id.tolist()
    assert len(Moves.from_bytes(data[:16] + bytes(8))) == 0
    cut = [data[:-1], data[:20], b"", b"x" + data[1:], data + b"\0", data[:8] + b"\2" + data[9:]]
    for bad in cut:
        with pytest.raises(ConfigError, match=f"{len(bad)} bytes"):
            Moves.from_bytes(bad)


def test_moves_of_one_layer_are_cut_to_it():
    manager, _ = demoting()
    moves = manager.moves()
    layer = moves.by_layer(2)
    assert layer.id.tolist() == moves.id.tolist()
    assert (layer.layer_lo.tolist(), layer.layer_hi.tolist()) == ([2, 2], [3, 3])
    assert len(moves.by_layer(4)) == 0
    with pytest.raises(ConfigError, match="5 layers of move"):
        manager.complete(moves.id, now=3, layers_done=5)
    for done in range(1, 4):
        assert manager.complete(moves.id, now=3, layers_done=done) == 0
    assert manager.complete(moves.id, now=3, layers_done=4) == 2


def test_a_limit_hands_out_the_first_moves():
    manager, _ = demoting()
    first, second = manager.moves(1), manager.moves(5)
    assert (len(first), len(second)) == (1, 1)
    assert first.id[0] != second.id[0]


def test_a_failed_load_is_planned_anew():
    manager = two_tiers(gpu=3, structure="holes")
    serve(manager, tokens(2), now=1)
    serve(manager, tokens(3, start=100), now=2)
    lease = manager.acquire(tokens(2), now=3, load="all", keep=0)
    assert {span.action for span in lease.plan.spans} == {"load"}
    assert lease.plan.recompute().size == 0
    moves = manager.moves()
    loads = moves.id[moves.kind == 0]
    manager.complete(moves.id[moves.kind == 1], now=4)
    manager.complete(int(loads[0]), now=4, ok=False, error="flipped bits")
    manager.complete(loads[1:], now=4)
    settle(manager, 4)
    [failed] = manager.failed()
    assert (failed.lease, failed.reason, failed.stop - failed.start) == (
        lease.id,
        "flipped bits",
        4,
    )
    assert lease.ready()
    assert lease.plan.recompute().tolist() == list(range(failed.start, failed.stop))
    assert manager.failed() == []
    lease.commit([], now=5)
    assert lease.plan.recompute().size == 0
    manager.audit()


def test_a_hung_move_keeps_its_slots_until_it_ends():
    manager, lease = demoting()
    moves = manager.moves()
    manager.complete(moves.id, now=3, ok=False, hung=True, error="deadline")
    assert manager.stats()["moves"] == 2
    manager.complete(moves.id, now=4, ok=False)
    assert manager.stats()["moves"] == 0
    lease.release()
    manager.audit()


def test_a_move_is_done_when_all_ranks_said_so():
    manager = two_tiers(gpu=2, ranks=2)
    lease = manager.acquire(tokens(2), now=1)
    lease.commit(tokens(2), now=1)
    lease.release()
    manager.acquire(tokens(2, start=100), now=2)
    moves = manager.moves()
    assert manager.complete(moves.id, now=3, rank=0) == 0
    assert manager.complete(moves.id, now=3, rank=1) == 2
    with pytest.raises(ConfigError, match="rank 2"):
        manager.complete(moves.id, now=3, rank=2)


# --------------------------------------------------------------------------------------- plans


def test_a_plan_counts_in_tokens_and_knows_its_holes():
    manager = one_tier(blocks=4, structure="holes", policy="lru")
    serve(manager, tokens(3), now=1)
    serve(manager, tokens(2, start=100), now=2)  # takes the oldest: block 0 of the first
    lease = manager.acquire(tokens(3), now=3, keep=0, load="plan")
    assert lease.matched == 12
    holes = lease.plan.recompute()
    assert holes.dtype == np.int64
    assert holes.tolist() == [0, 1, 2, 3]
    assert lease.plan.recompute(3).tolist() == holes.tolist()
    spans = [(span.start, span.stop, span.action) for span in lease.plan.spans]
    assert spans == [(0, 4, "recompute"), (4, 12, "reuse")]
    assert lease.plan.ready(0) <= lease.plan.finish
    with pytest.raises(ConfigError, match="layer is 4"):
        lease.plan.recompute(4)
    with pytest.raises(ConfigError, match="layer is 4"):
        lease.plan.ready(4)


def test_layers_of_a_load_become_ready_in_turn():
    slow = Lane("up", bytes_per_s=MODEL.block_bytes(4) * 1_000_000)  # a block takes 1000 ns
    tiers = [Tier("gpu", blocks=2), Tier("host", blocks=8, read=slow)]
    manager = BlockManager(MODEL, tiers, block_tokens=4)
    serve(manager, tokens(2), now=1)
    serve(manager, tokens(2, start=100), now=2)
    plan = manager.acquire(tokens(2), now=10**6, load="all", keep=0).plan
    [span] = plan.spans
    assert (span.action, span.tier, span.start, span.stop) == ("load", 1, 0, 8)
    assert span.ready - span.first_ready == 1750
    ready = [plan.ready(layer) for layer in range(4)]
    assert ready == [span.ready - 250 * left for left in (3, 2, 1, 0)]


def test_layer_slots_have_a_row_per_layer():
    manager = two_tiers(gpu=2, layer_slots=True)
    lease = manager.acquire(tokens(2), now=1)
    table = lease.slots(0)
    assert (table.shape, table.dtype) == ((4, 2), np.uint32)
    assert sorted(table.ravel().tolist()) == list(range(8))
    assert (lease.slots(1) == ABSENT).all()
    lease.commit(tokens(2), now=1)
    lease.release()
    other = manager.acquire(tokens(1, start=100), now=2)
    moves = manager.moves()
    assert (moves.layer_hi - moves.layer_lo == 1).all()
    manager.complete(moves.id, now=3)
    other.commit(tokens(1, start=100), now=3)
    found = manager.lookup(tokens(2), now=4, keep=0)
    layers = np.array([manager.layer_tiers(block) for block in found.blocks])
    assert layers.dtype == np.int8
    assert (layers == 1).sum() == len(moves)
    assert (np.diff(layers) >= 0).all()  # back layers leave first
    for block in found.blocks:
        for copy in block.copies:
            assert len(copy.slots) == copy.coming_hi - copy.coming_lo


def test_an_engine_binds_its_own_slots():
    tiers = [Tier("gpu", blocks=8, owner="engine"), Tier("host", blocks=8)]
    manager = BlockManager(MODEL, tiers, block_tokens=4)
    lease = manager.acquire(tokens(2), now=1)
    assert len(lease.slots(0)) == 0
    lease.bind(0, np.array([5, 3], dtype=np.uint32))
    assert lease.slots(0).tolist() == [5, 3]
    lease.commit(tokens(2), now=2)
    reading = lease.release(now=3)
    moves = manager.moves()
    assert sorted(reading.tolist()) == sorted(moves.id.tolist())
    assert sorted(moves.src_slot.tolist()) == [3, 5]
    manager.complete(moves.id, now=4)
    lease = manager.acquire(tokens(2), now=5, load="none", keep=0)
    assert lease.matched == 8
    assert lease.plan.recompute().size == 8
    ids = lease.load(now=6)
    assert lease.plan.recompute().size == 0
    assert len(manager.moves()) == 0  # their slots are not known yet
    lease.bind(0, [1, 2])
    moves = manager.moves()
    assert sorted(moves.id.tolist()) == sorted(ids.tolist())
    manager.complete(moves.id, now=7)
    with pytest.raises(ConfigError, match="slot 1, not 9"):
        lease.bind(0, [9])


# ------------------------------------------------------------------------------- the simulator


def test_transmissions_queue_on_their_lane():
    lane = Lane("up", bytes_per_s=MODEL.block_bytes(4) * 1_000_000, latency_ns=50)
    manager = BlockManager(MODEL, [Tier("gpu", blocks=1), Tier("host", blocks=1, read=lane)])
    sent = manager.transmit("up", 4, now=100)
    assert (sent.end, sent.first, sent.per_layer) == (1150, 400, 250)
    assert manager.transmit("up", 4, now=100, layers=1).end == 1150 + 50 + 250
    assert isinstance(sent, Transmission)
    assert sent != manager.transmit("up", 4, now=100)
    assert repr(sent) == "Transmission(end=1150, first=400, per_layer=250)"
    assert manager.stats()["lanes"]["up"]["bytes"] == MODEL.block_bytes(4) * 9 // 4
    with pytest.raises(ConfigError, match="'down'"):
        manager.transmit("down", 4, now=1)
    with pytest.raises(ConfigError, match="5 layers"):
        manager.transmit("up", 4, now=1, layers=5)


def test_marks_may_lie_in_the_future():
    manager = two_tiers()
    handles = manager.mark(tokens(2), "host", present=True, now=10, ready=130, per_layer=40)
    assert handles.size == 2
    found = manager.lookup(tokens(2), now=20, keep=0)
    assert found.handles.tolist() == handles.tolist()
    [copy] = found.blocks[0].copies
    assert (copy.tier, copy.first, copy.ready) == (1, 20, 130)
    assert (copy.layer_hi, copy.coming_hi) == (0, 4)
    manager.mark(tokens(1, start=50), 0, present=True, now=200, first=300, per_layer=1)
    [copy] = manager.lookup(tokens(2), now=200, keep=0).blocks[0].copies
    assert (copy.layer_hi, copy.ready) == (4, 200)
    [copy] = manager.lookup(tokens(1, start=50), now=200, keep=0).blocks[0].copies
    assert (copy.first, copy.ready) == (300, 303)
    manager.mark(tokens(2), "host", present=False, now=210)
    assert manager.lookup(tokens(2), now=210, keep=0).tokens == 0
    manager.audit()


@pytest.mark.parametrize(
    ("times", "said"),
    [
        ({"ready": 100, "first": 101}, "first is 101, later than ready at 100"),
        ({"first": 5}, "first is 5 without"),
        ({"per_layer": 5}, "per_layer is 5 without"),
        ({"ready": 10, "per_layer": 5}, "4 layers of 5 ns do not fit before ready at 10"),
        ({"ready": 10, "first": 1, "per_layer": 2}, "ready is 10.* end at 7"),
        ({"first": 2**63 - 1, "per_layer": 2**63 - 1}, "per_layer is 9223372036854775807"),
    ],
)
def test_marks_whose_times_contradict_each_other(times, said):
    with pytest.raises(ConfigError, match=said):
        two_tiers().mark(tokens(1), 0, present=True, now=1, **times)


def test_an_index_comes_back():
    manager = two_tiers()
    rows = [
        (None, tokens(1), 3, 500, 2),
        (0, [4, 5, 6, 7], 0, 400, 1),
        (0, [9], 1, 0, 1),  # no full block
        (2, tokens(1, start=8), 2, 0, 1),  # its parent was left out
        (None, tokens(1, start=50), 3, 0, 1),  # its slot is taken
    ]
    assert manager.load_index(rows, now=1000) == 2
    first, second = manager.lookup(tokens(2), now=1000, keep=0).blocks
    assert (first.copies[0].tier, first.copies[0].slot, second.copies[0].slot) == (1, 3, 0)
    assert manager.explain(first, now=1000, tier="host").idle == 500
    with pytest.raises(ConfigError, match="row 0 names row 1"):
        two_tiers().load_index([(1, tokens(1), 0, 0, 1)], now=1, tier=1)
    manager.audit()


# ---------------------------------------------------------------------------- what it tells


def test_an_explanation_is_the_product_of_its_terms():
    manager = one_tier(policy="weighted", cost="seed")
    serve(manager, tokens(4), now=0, session="chat")
    blocks = manager.lookup(tokens(4), now=0, keep=0).blocks
    for at, block in enumerate(blocks):
        told = manager.explain(block, now=2 * 10**9)
        assert told.weights["position"] == (at + 1) / 4
        product = told.terms["base"] * told.weights["layer"] * told.weights["position"]
        assert told.cost == pytest.approx(product)
        assert told.value == pytest.approx(told.cost / 2)
        assert (told.idle, told.layers) == (2 * 10**9, (0, 4))
        assert told.rank == (0 if at == 3 else None)  # leaf-only: only the last may leave
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
    assert (stats["leases"], stats["moves"], stats["queued"], stats["clamped"]) == (0, 0, 0, 4)
    gpu, host = stats["tiers"]["gpu"], stats["tiers"]["host"]
    assert (gpu["slots"], host["slots"], gpu["inserted"], gpu["tokens_wanted"]) == (2, 2, 9, 36)
    assert host["bytes_written"] == host["moves"] * MODEL.block_bytes(4) > 0
    events = manager.take_events()
    assert len(events) == 3
    assert {event.reason for event in events} == {"demoted", "dropped"}
    demoted = next(event for event in events if event.reason == "demoted")
    assert (demoted.tier, demoted.to, demoted.layer_lo, demoted.layer_hi) == (0, 1, 0, 4)
    assert manager.take_events() == []


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


# ------------------------------------------------------------------------------------ endings


def test_reset_wants_nothing_held():
    manager = one_tier()
    lease = manager.acquire(tokens(1), now=1)
    with pytest.raises(ConfigError, match="1 leases"):
        manager.reset()
    lease.commit(tokens(1), now=1)
    lease.release()
    manager.reset()
    assert manager.stats()["blocks"] == 0
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
    assert manager.stats()["leases"] == 0


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
    settle(manager, 100)
    assert manager.stats()["leases"] == 0
    manager.audit()
