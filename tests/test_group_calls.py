"""Calls of a manager that keeps groups of layers apart, through Python."""

from __future__ import annotations

import numpy as np
import pytest

from kvtrie import BlockManager, Index, LayerGroup, ModelShape, ResumeAt, ResumePoints, Tier
from kvtrie.errors import ConfigError

MODEL = ModelShape(
    4,
    1,
    8,
    "float32",
    groups=(LayerGroup((0, 2)), LayerGroup((1, 3), kind="sliding", window=9)),
    fingerprint="test",
)


NO_SLOT = 2**32 - 1


def two_tiers(**settings):
    tiers = [Tier(kind, bytes="1MiB", owner="none") for kind in ("gpu", "host")]
    return BlockManager(MODEL, tiers, block_tokens=4, resume=ResumePoints(), **settings)


def serve(manager, tokens, now):
    lease = manager.acquire(tokens, now=now)
    lease.commit(tokens[lease.matched :], now=now)
    return lease


def test_a_plan_names_the_borders_of_passes_and_a_truncated_lease_goes_back_to_one():
    manager = two_tiers()
    tokens = np.arange(26, dtype=np.uint32)
    lease = manager.acquire(tokens, now=1)
    assert lease.plan.resume == [24]
    lease.commit(tokens, now=1)
    lease.truncate(19, now=2)
    assert lease.tokens == 16
    with pytest.raises(ConfigError, match="owner is not 'engine'"):
        lease.bind(0, [1], group=1)


def test_a_hole_is_computed_after_the_window_before_it():
    manager = two_tiers(structure="holes")
    tokens = np.arange(25, dtype=np.uint32)
    serve(manager, tokens[:24], 1).release(now=2)
    manager.mark(tokens[:16], "gpu", present=False, now=3, skip=3)
    lease = manager.acquire(tokens, now=4)
    assert lease.matched == 24
    assert lease.plan.recompute().tolist() == [12, 13, 14, 15]
    assert NO_SLOT not in lease.slots(0, group=1)[1:3]
    lease.commit(tokens[24:], now=5)
    lease.release(now=6)
    assert not len(manager.acquire(tokens, now=7).plan.recompute())
    manager.audit()


def test_an_index_carries_the_groups_of_its_rows():
    manager = two_tiers()
    tokens = np.arange(24, dtype=np.uint32)
    serve(manager, tokens, 1).release(now=2)
    manager.flush(now=3)
    moves = manager.moves()
    manager.complete(moves.id, now=4)
    index = manager.index("host", now=5)
    assert index.group.tolist().count(1) == 3  # of the points after 20 and 24 tokens
    assert sorted({len(row) for row in index}) == [4, 5]
    again = two_tiers()
    assert again.load_index(Index(index), now=6) == 6
    assert again.lookup(np.append(tokens, 99), now=7).tokens == 24


def test_an_engine_names_its_slots_in_each_group():
    tiers = [Tier("gpu", blocks=64, owner="engine"), Tier("host", bytes="1MiB", owner="none")]
    manager = BlockManager(MODEL, tiers, block_tokens=4, resume=ResumePoints())
    tokens = np.arange(24, dtype=np.uint32)
    lease = manager.acquire(tokens, now=1)
    lease.bind(0, range(6))
    lease.bind(0, range(10, 16), group=1)
    lease.commit(tokens, now=1)
    lease.release(now=2)
    stores = manager.moves()
    assert sorted(stores.src_slot[stores.group == 1].tolist()) == [10, 11, 12, 13, 14, 15]
    manager.complete(stores.id, now=3)
    again = manager.acquire(np.append(tokens, 99), now=4)
    assert again.matched == 24
    again.bind(0, range(20, 27))
    again.bind(4, [30, 31, 32], group=1)
    loads = manager.moves()
    assert loads.dst_slot[loads.group == 1].tolist() == [30, 31]
    assert again.slots(0, group=1).tolist()[4:6] == [30, 31]
    manager.complete(loads.id, now=5)
    again.release(now=6)
    manager.audit()


def test_copies_and_events_carry_the_group():
    tiers = [Tier(kind, bytes="1MiB", owner="none") for kind in ("gpu", "host", "disk")]
    manager = BlockManager(
        MODEL, tiers, block_tokens=4, resume=ResumePoints(), events=100, events_of="residency"
    )
    tokens = np.arange(24, dtype=np.uint32)
    serve(manager, tokens, 1).release(now=2)
    for now in (3, 5):
        manager.flush(now=now)
        manager.complete(manager.moves().id, now=now + 1)
    blocks = manager.lookup(tokens, now=7, keep=0).blocks
    found = [[(copy.tier, copy.group) for copy in block.copies] for block in blocks]
    assert found[-1] == [(tier, group) for tier in range(3) for group in range(2)]
    assert found[0] == [(0, 0), (0, 1), (1, 0), (2, 0)]
    events = manager.take_events()
    stored = [(event.tier, event.group) for event in events if event.block == blocks[-1].block]
    assert sorted(stored) == found[-1]
    assert {event.layer_hi for event in events} == {2}


def test_metrics_and_a_view_carry_the_group():
    from prometheus_client import CollectorRegistry

    from kvtrie.cli.scrape import Scrape
    from kvtrie.cli.view import View
    from kvtrie.metrics import Collector

    manager = two_tiers()
    serve(manager, np.arange(24, dtype=np.uint32), 1).release(now=2)
    registry = CollectorRegistry()
    collector = Collector(manager)
    registry.register(collector)
    labels = {"machine": "0", "tier": "gpu", "policy": manager.stats().tiers["gpu"].policy}
    for group, slots in enumerate(manager.stats().tiers["gpu"].groups):
        one = {**labels, "group": str(group)}
        assert registry.get_sample_value("kvtrie_group_held_slots", one) == slots.held
        assert registry.get_sample_value("kvtrie_group_released_slots", one) == slots.released
    view = View.between(Scrape({}), Scrape.of(collector.collect()))
    assert [tier.groups for tier in view.tiers] == [((6, 0), (3, 3)), ((0, 0), (0, 0))]


def test_a_hint_names_borders_that_stay_resumable():
    manager = two_tiers()
    tokens = np.arange(24, dtype=np.uint32)
    [reply] = manager.hint([ResumeAt(tokens=tokens, borders=[12])], now=1)
    assert (reply.answer, reply.blocks, reply.code) == ("deferred", 0, "waiting")
    assert reply.not_applied == 1
    with manager.acquire(tokens, now=2) as lease:
        assert lease.plan.resume == [12, 20, 24]
        lease.commit(tokens, now=3)
        [reply] = manager.hint([ResumeAt(lease=lease, borders=np.array([8, 12]))], now=4)
        assert (reply.answer, reply.blocks) == ("accepted", 2)
    for borders, part in [([10], "10 tokens is not at the end of a block of 4"), ([28], "has 24")]:
        with pytest.raises(ConfigError, match=part):
            manager.hint([ResumeAt(tokens=tokens, borders=borders)], now=5)
    with pytest.raises(ConfigError, match="0 borders are named"):
        ResumeAt(tokens=tokens, borders=[])
    with pytest.raises(ConfigError, match="a sequence of token counts"):
        ResumeAt(tokens=tokens, borders="12")


def test_a_miss_of_several_groups_has_its_causes():
    manager = two_tiers()
    tokens = np.arange(24, dtype=np.uint32)
    serve(manager, tokens, 1).release(now=2)
    miss = manager.explain_miss(np.append(tokens, [7, 8, 9, 10]), now=3)
    assert (miss.found, miss.causes) == ([24, 0], [(24, 28, "new")])


def test_blocks_leave_host_memory_on_request():
    manager = two_tiers()
    tokens = np.arange(24, dtype=np.uint32)
    manager.mark(tokens, "host", present=True, now=1)
    assert len(manager.evict(6, "host", now=2)) == 6
    assert manager.lookup(np.append(tokens, 99), now=3).tokens == 0


def test_windows_leave_alone_unless_they_are_pinned():
    manager = two_tiers()
    tokens = np.arange(24, dtype=np.uint32)
    lease = serve(manager, tokens, 1)
    blocks = lease.handles
    lease.release(now=2)
    pin = manager.pin_copies(blocks[-1:], "gpu", now=3, group=1)
    left = manager.evict(100, "gpu", now=4, group=1)
    assert len(left)
    assert blocks[-1] not in left
    assert (manager.lookup(tokens, now=5, keep=0).tokens, manager.known(tokens)) == (0, 24)
    with pytest.raises(ConfigError, match="is held 1 times in group 1"):
        manager.clear_copies(blocks[-1:], "gpu", group=1, now=6)
    manager.unpin_copies(pin, now=7)
    assert manager.clear_copies(blocks, "gpu", group=1, now=8).tolist() == [blocks[-1]]
    for wrong in (0, 2):
        with pytest.raises(ConfigError, match=f"group {wrong}|is group 0"):
            manager.clear_copies(blocks, "gpu", group=wrong, now=9)
    with pytest.raises(ConfigError, match="1 blocks stay"):
        manager.evict(1, "gpu", now=9, stay=blocks[:1], group=1)
    manager.audit()
