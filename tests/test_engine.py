"""A first tier whose slots the engine owns: what `Lease` reports and takes there."""

from __future__ import annotations

import numpy as np
import pytest
from serving import ABSENT, MODEL, complete_all_moves, tokens, two_tiers

from kvtrie import BlockManager, ConfigError, Moves, Tier
from kvtrie.errors import ClosedError


def engine(**settings):
    tiers = [Tier("gpu", blocks=8, owner="engine"), Tier("host", blocks=8)]
    return BlockManager(MODEL, tiers, block_tokens=4, **settings)


def on_host(blocks, **settings):
    """A manager with blocks on host, and a lease on them that loads nothing."""
    manager = engine(**settings)
    manager.mark(tokens(blocks), "host", present=True, now=1)
    return manager, manager.acquire(tokens(blocks), now=2, keep=0, load="none")


def test_an_engine_binds_its_own_slots():
    manager = engine()
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


def test_an_engine_stores_what_it_will_commit_with_the_step_that_writes_it():
    tiers = [Tier("gpu", blocks=8, owner="engine", write="through"), Tier("host", blocks=8)]
    manager = BlockManager(MODEL, tiers, block_tokens=4)
    lease = manager.acquire(tokens(3), now=1)
    lease.bind(0, [5, 3, 6])
    with pytest.raises(ConfigError, match="blocks 0 to before 4, lease 1 has committed 0"):
        lease.store_ahead((0, 4), now=1)
    with pytest.raises(ConfigError):
        lease.store_ahead((0, -1), now=1)
    ids = lease.store_ahead((0, 2), now=1)
    assert ids.tolist() + lease.store_ahead(now=1).tolist() == [1, 2, 3]
    moves = Moves.from_bytes(manager.moves().to_bytes())
    assert moves.src_slot.tolist() == [5, 3, 6]
    assert (moves.block.tolist(), moves.after.tolist()) == ([2**64 - 1] * 3, [0] * 3)
    assert (manager.stats().moves, manager.stats().tiers["host"].free) == (3, 5)
    manager.complete(moves.id, now=2)
    done = lease.commit(tokens(2), now=3)
    assert done.ahead == len(done.new) == 2
    assert manager.lookup(tokens(3), now=3).tokens == 8
    assert len(manager.moves()) == 0
    lease.drop_ahead(now=4)
    assert manager.stats().tiers["host"].free == 6
    lease.release(now=5)
    manager.audit()


def test_blocks_that_load_brings_are_hits_once():
    manager, lease = on_host(3)
    lease.bind(0, [1, 2, 3])

    last = manager.stats()

    def hits():
        nonlocal last
        stats = manager.stats()
        stats.since(last)  # every counter grows, misses too
        last, host = stats, stats.tiers["host"]
        assert host.tokens_hit == 4 * host.hits
        return host.hits

    assert hits() == 0
    assert last.tiers["host"].misses == 0  # not known yet
    found = []
    for blocks in ((1, 2), (1, 3), (0, 3), (0, 3)):
        lease.load(blocks=blocks, now=3)
        found.append(hits())
    assert found == [1, 2, 3, 3]
    other = manager.acquire(tokens(3), now=4, keep=0, load="all")
    other.load(now=5)
    assert hits() == 6
    stats = manager.stats()
    assert (stats.tiers["gpu"].hits, stats.requests) == (0, 2)
    third = manager.acquire(tokens(3), now=6, keep=0, load="none")
    third.load(blocks=(0, 1), now=7)
    assert (hits(), last.tiers["host"].misses) == (7, 0)
    third.release(now=8)
    assert (hits(), last.tiers["host"].misses, last.tiers["gpu"].misses) == (7, 2, 9)


def test_a_lease_lists_its_blocks():
    manager, lease = on_host(2)
    found = manager.lookup(tokens(2), now=3, keep=0).handles
    assert lease.handles.dtype == np.uint64
    assert lease.handles.tolist() == found.tolist()
    lease.bind(0, [4, 5, 6])
    new = lease.commit(np.arange(90, 95), now=4).new  # all of a block, and one token
    assert lease.handles.tolist() == [*found.tolist(), *new.tolist()]
    assert len(new) == 1
    lease.release(now=5)
    with pytest.raises(ClosedError):
        _ = lease.handles


def test_room_is_what_the_engine_makes_it():
    manager = engine()
    lease = manager.acquire(tokens(2), now=1)
    lease.bind(0, [0, 1])
    assert (lease.room, two_tiers().acquire([1], now=1).room) == (None, 4)
    assert manager.stats().tiers["gpu"].free == 8


def test_a_suspended_lease_lists_the_moves_that_still_read_its_slots():
    manager = engine()
    lease = manager.acquire(tokens(2), now=1)
    lease.bind(0, [5, 3])
    lease.commit(tokens(2), now=2)
    reading = lease.suspend(now=3)
    moves = manager.moves()
    assert (reading.dtype, reading.tolist()) == (np.uint64, moves.id.tolist())
    assert moves.kind.tolist() == [Moves.STORE] * 2
    manager.complete(moves.id, now=4)
    ours = two_tiers()
    assert ours.acquire(tokens(1), now=1).suspend(now=2).size == 0


@pytest.mark.parametrize(("load", "loaded"), [("all", 8), ("none", 0)])
def test_resume_loads_the_given_blocks(load, loaded):
    manager, lease = on_host(2, structure="holes")
    lease.commit([], now=3)
    lease.suspend(now=4)
    plan = lease.resume(now=5, load=load)
    assert plan.recompute().size == 8 - loaded
    lease.suspend(now=6)
    with pytest.raises(ConfigError, match="not 'some'"):
        lease.resume(now=7, load="some")
    assert lease.state == "suspended"
    complete_all_moves(manager, 8)
    assert manager.stats().moves == 0


def test_what_the_engine_shares_is_left_out_of_the_loads():
    manager, lease = on_host(4)
    lease.bind(0, [7, 6, 5, 4])
    ids = lease.load(blocks=(1, 3), now=3)
    moves = manager.moves()
    assert moves.id.tolist() == ids.tolist()
    assert moves.dst_slot.tolist() == [6, 5]
    assert lease.plan.recompute().tolist() == [0, 1, 2, 3, 12, 13, 14, 15]
    manager.complete(moves.id, now=4)
    assert lease.load((2, 4), (3, 4), now=5).size == 1
    assert lease.load(blocks=(4, 4), now=5).size == 0
    for blocks, message in [
        ((0, 5), "blocks 0 to before 5, lease 1 has matched 4"),
        ((3, 2), "blocks 3 to before 2"),
        ((-1, 2), "first block is -1"),
    ]:
        with pytest.raises(ConfigError, match=message):
            lease.load(blocks=blocks, now=6)
    complete_all_moves(manager, 7)
    lease.commit([], now=8)
    assert lease.release(now=9).size == 0


@pytest.mark.parametrize("structure", ["leaf-only", "holes"])
def test_a_block_that_did_not_come_is_computed_in_its_slot_and_stored_anew(structure):
    manager, lease = on_host(3, structure=structure)
    table = [6, 2, 4]
    lease.bind(0, table)
    lease.load(now=3)
    moves = manager.moves()
    manager.complete(moves.id[1], now=4, ok=False, error="unreadable")
    manager.complete(moves[[0, 2]].id, now=4)
    assert lease.ready()
    lease.bind(0, table)
    assert lease.slots(0).tolist() == table
    lease.commit(tokens(3)[lease.tokens :], now=5)
    assert lease.slots(0).tolist() == table
    lease.release(now=6)
    stores = manager.moves()
    assert stores.src_slot[0] == table[1]
    manager.complete(stores.id, now=7)
    found = manager.lookup(tokens(3), now=8, keep=0)
    assert [[copy.tier for copy in block.copies] for block in found.blocks] == [[1]] * 3
    manager.audit()


def test_slots_that_were_never_named_take_their_loads_with_them():
    manager, lease = on_host(2)
    lease.load(now=3)
    assert lease.slots(0).tolist() == [ABSENT] * 2
    assert lease.release(now=4).size == 0
    assert manager.stats().moves == 0
    assert manager.lookup(tokens(2), now=5, keep=0).tokens == 8
