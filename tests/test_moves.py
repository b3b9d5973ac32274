"""Moves, plans and layers: what an executor and a simulator see."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from serving import ABSENT, MODEL, complete_all_moves, demoting, one_tier, serve, tokens, two_tiers

from kvtrie import BlockManager, ConfigError, Index, Lane, Moves, Tier, Transmission


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
    assert data[:12] == b"kvtrmove\x02\0\0\0"
    assert np.frombuffer(data, "<u8", 2, offset=24).tolist() == moves.id.tolist()
    assert len(Moves.from_bytes(data[:16] + bytes(8))) == 0
    cut = [data[:-1], data[:20], b"", b"x" + data[1:], data + b"\0", data[:8] + b"\1" + data[9:]]
    for bad in cut:
        with pytest.raises(ConfigError, match=f"{len(bad)} bytes"):
            Moves.from_bytes(bad)


def test_a_part_of_moves_is_chosen_as_of_an_array():
    manager = two_tiers(gpu=4)
    serve(manager, tokens(4), now=1)
    manager.acquire(tokens(4, start=100), now=2)
    moves = manager.moves()
    rows = list(moves)
    for part, chosen in [
        (moves[1:3], rows[1:3]),
        (moves[::-2], rows[::-2]),
        (moves[moves.id > moves.id[1]], rows[2:]),
        (moves[np.array([3, 0, -1])], [rows[3], rows[0], rows[3]]),
        (moves[[1]], rows[1:2]),
        (moves[[]], []),
        (moves[moves.kind == Moves.LOAD], []),
    ]:
        assert isinstance(part, Moves)
        assert list(Moves.from_bytes(part.to_bytes())) == chosen
    assert moves[np.uint64(2)] == moves[np.array(2)] == rows[2]
    for bad in (4, [4], np.ones(3, dtype=bool), np.ones(2), None, "id", np.ones((4, 1), dtype=int)):
        with pytest.raises(IndexError):
            moves[bad]


def test_kinds_have_names():
    assert (Moves.LOAD, Moves.STORE, Moves.COPY) == (0, 1, 2)
    manager, _ = demoting()
    assert {move.kind for move in manager.moves()} == {Moves.STORE}


def test_whatever_stands_for_an_integer_is_an_id():
    class Id:
        def __init__(self, number):
            self.number = number

        def __index__(self):
            return self.number

    manager = two_tiers(gpu=4)
    serve(manager, tokens(4), now=1)
    lease = manager.acquire(tokens(3, start=100), now=2)
    first, second, third = manager.moves().id
    assert isinstance(first, np.uint64)
    for one in (first, Id(int(first)), np.array(first), [first], (Id(int(first)),), {int(first)}):
        assert manager.predict(one, now=3)[0].size == 1
    assert manager.complete(first, now=3) == 1
    assert manager.complete(Id(int(second)), now=3) == 1
    assert manager.complete(np.array(third), now=3) == 1
    [committed] = manager.commit_many(np.uint64(lease.id), [tokens(1, start=100)], now=4)
    assert len(committed.new) == 1
    for bad in (1.5, None, "1", [1.5], [[1]], np.array(1.5)):
        with pytest.raises(ConfigError):
            manager.complete(bad, now=5)


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


def test_moves_of_whole_blocks_for_a_rank_with_other_layers():
    manager, _ = demoting()
    moves = manager.moves()
    own = moves.of_layers(7)
    assert (own.layer_lo.tolist(), own.layer_hi.tolist()) == ([0, 0], [7, 7])
    for name in ("id", "src_slot", "dst_slot", "after", "label"):
        assert list(getattr(own, name)) == list(getattr(moves, name))
    assert set(moves.layer_hi.tolist()) == {4}
    for bad in (0, -1, 65_536, 1.5):
        with pytest.raises(ConfigError):
            moves.of_layers(bad)


@pytest.mark.parametrize("tiers", [[0, 1], [1, 0, 2], [0], []])
@pytest.mark.parametrize("layer_slots", [False, True])
def test_moves_that_can_be_copied_at_once_are_together(layer_slots, tiers):
    manager = two_tiers(gpu=4, host=4, layer_slots=layer_slots)
    for at in range(3):
        serve(manager, tokens(2, start=100 * at), now=at + 1)
    lease = manager.acquire(tokens(2), now=9, load="all", keep=0)
    moves = manager.moves()
    assert Moves.LOAD in moves.kind
    assert moves.after.any()
    parts, others = moves.together(tiers)

    def way(move):
        return (move.kind, move.lease, move.src, move.dst, move.layer_lo, move.layer_hi)

    free = [m for m in moves if not m.after and {m.src, m.dst} <= set(tiers)]
    expected = {}
    for move in free:
        expected.setdefault(way(move), []).append(move)
    assert [list(part) for part in parts] == list(expected.values())
    assert list(others) == [move for move in moves if move not in free]
    lease.release()
    with pytest.raises(ConfigError, match="tier 0 is 256, 0 to 255 wanted"):
        moves.together([256])


def test_moves_of_one_way_are_one_part():
    manager, lease = demoting()
    moves = manager.moves()
    parts, others = moves.together([0, 1])
    assert [part.id.tolist() for part in parts] == [moves.id.tolist()]
    assert (len(others), manager.moves().together([0, 1])[0]) == (0, [])
    lease.release()


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
    complete_all_moves(manager, 4)
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
    assert manager.stats().moves == 2
    manager.complete(moves.id, now=4, ok=False)
    assert manager.stats().moves == 0
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


def test_transmissions_queue_on_their_lane():
    lane = Lane("up", bytes_per_s=MODEL.block_bytes(4) * 1_000_000, latency_ns=50)
    manager = BlockManager(MODEL, [Tier("gpu", blocks=1), Tier("host", blocks=1, read=lane)])
    sent = manager.transmit("up", 4, now=100)
    assert (sent.end, sent.first, sent.per_layer) == (1150, 400, 250)
    assert manager.transmit("up", 4, now=100, layers=1).end == 1150 + 50 + 250
    assert isinstance(sent, Transmission)
    assert sent != manager.transmit("up", 4, now=100)
    assert repr(sent) == "Transmission(end=1150, first=400, per_layer=250)"
    assert manager.stats().lanes["up"].bytes == MODEL.block_bytes(4) * 9 // 4
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
    manager.mark(tokens(2), "host", present=True, now=500)
    manager.mark(tokens(1, start=50), "host", present=True, now=800)
    index = manager.index(now=1000)
    assert repr(index) == "Index(3 blocks)"
    assert index.age.tolist().count(500) == 2
    assert index.uses.tolist() == [1, 1, 1]
    assert index.key.shape == (3, 32)
    again = two_tiers()
    assert again.load_index(index, now=2000) == 3
    first, second = again.lookup(tokens(2), now=2000, keep=0).blocks
    slots = [copy.slot for block in (first, second) for copy in block.copies]
    assert set(slots) < set(index.slot.tolist())
    assert again.explain(first, now=2000, tier="host").idle == 500
    again.audit()
    # Rows survive as tuples; without the first block, the blocks after it are left out.
    rows = [row for row in Index(index) if row[1] != slots[0]]
    assert two_tiers().load_index(Index(rows), now=2000) == 1


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ((b"", 0, 0, 4), "0 bytes are no label"),
        ((b"x" * 99, 0, 0, 4), "99 bytes are no label"),
        ((b"", 0, 0), "a row of an index is"),
        (("label", 0, 0, 4), "a row of an index is"),
    ],
)
def test_rows_that_are_none(row, said):
    with pytest.raises(ConfigError, match=said):
        Index([row])


def test_stores_to_a_disk_carry_a_label():
    manager = BlockManager(
        MODEL, [Tier("gpu", blocks=1), Tier("disk", blocks=4)], block_tokens=4, policy="lru"
    )
    for stem in (1, 2):
        lease = manager.acquire(tokens(1, start=stem * 50), now=stem)
        stores = manager.moves()
        manager.complete(stores.id, now=stem)
        lease.commit(tokens(1, start=stem * 50), now=stem)
        lease.release()
    (label,), (key,) = stores.label, stores.key
    assert stores[0].label == label
    assert Moves.from_bytes(stores.to_bytes()).label == [label]
    (row,) = Index([(label, 0, 0, 4)]).key
    assert (row == key).all()


def test_a_flush_copies_down_what_stands_only_above():
    manager = two_tiers()
    lease = manager.acquire(tokens(2), now=1, reserve=8)
    lease.commit(tokens(2), now=1)
    lease.release()
    assert manager.flush(now=2) == 2
    manager.complete(manager.moves().id, now=3)
    assert len(manager.index(now=3)) == 2
    assert manager.flush(now=4) == 0
