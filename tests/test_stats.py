"""Counters, histograms and the eviction log, as Python sees them."""

import json

import pytest
from serving import MODEL, one_tier, serve, tokens, two_tiers

from kvtrie import BlockManager, ClosedError, ConfigError, Histogram, InvariantError, Stats, Tier
from kvtrie.settings.tier import Lane

CAUSES = ["demand", "ahead", "suspended", "failed", "cleared", "reset", "hinted"]


def busy(**settings):
    """A manager of two small tiers that has served and evicted."""
    manager = two_tiers(gpu=2, host=2, **settings)
    for at in range(5):
        serve(manager, tokens(2, start=100 * at), now=1000 + 10 * at)
    return manager


def test_hits_and_misses_are_what_was_asked():
    manager = busy()
    serve(manager, tokens(2, start=400), now=2000)
    stats = manager.stats()
    gpu, host = stats.tiers.values()
    assert (stats.requests, stats.blocks_wanted, stats.tokens_wanted) == (6, 12, 48)
    assert gpu.hits + gpu.misses == stats.blocks_wanted
    assert host.hits + host.misses == gpu.misses
    assert (gpu.hits, gpu.hit_age.count) == (1, 1)  # the last token stays to be computed
    assert gpu.tokens_hit == 4 * gpu.hits
    assert (gpu.kind, gpu.policy, list(gpu.evictions)) == ("gpu", "learned", CAUSES)
    assert gpu.evicted == sum(gpu.evictions.values()) == gpu.evict_age.count > 0
    assert gpu.evicted == gpu.evicted_clean + gpu.evicted_dirty + gpu.dropped
    assert gpu.copies == gpu.clean + gpu.dirty <= gpu.slots
    assert gpu.retained == host.retained == 0


def test_a_result_is_frozen_and_stays_what_it_was():
    manager = busy()
    stats = manager.stats()
    seen = json.dumps(stats.as_dict())
    with pytest.raises(AttributeError):
        stats.requests = 0
    with pytest.raises(TypeError):
        stats.tiers["gpu"] = stats.tiers["host"]
    with pytest.raises(TypeError):
        stats.tiers["gpu"].evictions["demand"] = 0
    serve(manager, tokens(2, start=900), now=3000)
    assert json.dumps(stats.as_dict()) == seen
    assert manager.stats().requests == stats.requests + 1


def test_dictionaries_have_every_attribute():
    stats = busy().stats()

    def public(thing, but):
        return {name for name in dir(type(thing)) if not name.startswith("_")} - but

    as_dict = stats.as_dict()
    assert as_dict.keys() == public(stats, {"since", "as_dict"})
    tier = as_dict["tiers"]["gpu"]
    assert tier.keys() == public(stats.tiers["gpu"], {"kind"})
    assert tier["hit_age"].keys() == {"count", "sum", "p50", "p90", "p99", "max"}
    lane = next(iter(as_dict["lanes"].values()))
    assert lane.keys() == public(next(iter(stats.lanes.values())), set())
    assert tier["dirty"] == stats.tiers["gpu"].dirty
    assert tier["evictions"] == dict(stats.tiers["gpu"].evictions)


def test_a_difference_is_what_came_between():
    manager = busy()
    before = manager.stats()
    serve(manager, tokens(2, start=500), now=5000)
    after = manager.stats()
    between = after.since(before)
    assert (between.requests, between.blocks_wanted, between.now) == (1, 2, after.now)
    for kind, tier in between.tiers.items():
        new, old = after.tiers[kind], before.tiers[kind]
        assert tier.evicted == new.evicted - old.evicted == tier.evict_age.count
        assert dict(tier.evictions) == {c: new.evictions[c] - old.evictions[c] for c in CAUSES}
        assert tier.store_time.sum == new.store_time.sum - old.store_time.sum
        assert (tier.free, tier.copies) == (new.free, new.copies)
    nothing = after.since(after)
    assert (nothing.requests, nothing.tiers["gpu"].hits, nothing.tiers["host"].moves) == (0, 0, 0)
    with pytest.raises(ConfigError, match="of time"):
        before.since(after)
    with pytest.raises(ConfigError, match="no earlier"):
        after.since(one_tier(4).stats())


def test_lanes_are_named():
    read = Lane("up", 1e9)
    manager = BlockManager(MODEL, [Tier("gpu", blocks=4), Tier("host", blocks=4, read=read)])
    manager.transmit("up", 16, now=10)
    lane = manager.stats().lanes["up"]
    assert (lane.bytes, lane.free_at) == (MODEL.block_bytes(16), 10 + lane.predicted_ns)
    assert lane.busy_ns == 0  # no call has reported that it carried anything
    manager.add_lane_busy("up", busy_ns=7)
    manager.add_lane_busy("up", busy_ns=5)
    assert manager.stats().lanes["up"].busy_ns == 12
    assert "busy_ns" in repr(lane)
    with pytest.raises(ConfigError, match="no lane 'down'"):
        manager.add_lane_busy("down", busy_ns=1)


def test_reset_keeps_the_counters_and_counts_what_stood():
    manager = busy(eviction_log=9)
    before = manager.stats()
    assert manager.evictions()
    manager.reset()
    after = manager.stats()
    assert (after.requests, after.blocks) == (before.requests, 0)
    for kind, tier in after.tiers.items():
        assert tier.evictions["reset"] == before.tiers[kind].copies
        assert (tier.copies, tier.clean, tier.evict_age.count) == (0, 0, tier.evicted)
    assert manager.evictions() == []
    assert after.since(before).tiers["gpu"].evictions["reset"] > 0


def test_a_closed_or_broken_manager_has_no_counters():
    manager = busy()
    manager.close()
    for call in (manager.stats, manager.evictions):
        with pytest.raises(ClosedError, match="closed"):
            call()
    assert issubclass(InvariantError, RuntimeError)


def test_histograms_tell_counts_and_quantiles():
    manager = one_tier(8)
    for now in (0, 1000, 3000, 103_000):
        serve(manager, tokens(2), now=now)
    ages = manager.stats().tiers["gpu"].hit_age
    assert isinstance(ages, Histogram)
    assert (ages.count, ages.sum) == (3, 1000 + 2000 + 100_000)
    assert 2000 <= ages.quantile(0.5) <= 2000 * 17 / 16
    assert 100_000 <= ages.quantile(1.0) <= 100_000 * 17 / 16
    assert ages.up_to([500, 1500, 10_000, 10**9]) == [0, 1, 2, 3]
    assert ages == ages.since(manager.stats().tiers["gpu"].evict_age)  # nothing has left
    assert ages.as_dict()["p50"] == ages.quantile(0.5)
    assert repr(ages).startswith("Histogram(count=3, p50=")
    with pytest.raises(ConfigError, match=r"share is 1.5"):
        ages.quantile(1.5)
    with pytest.raises(ConfigError, match="bound 1 is 5, more than 5"):
        ages.up_to([5, 5])
    with pytest.raises(ConfigError, match="3 times are no earlier state of these 0"):
        ages.since(ages).since(ages)


def test_the_log_holds_the_last_evictions():
    manager = busy(eviction_log=3, policy="retention")
    log = manager.evictions()
    assert (len(log), manager.evictions(1)[0].at) == (3, log[-1].at)
    assert manager.evictions(0) == []
    assert len(manager.evictions()) == 3, "they stay"
    entry = log[-1]
    assert (entry.at, entry.cause, entry.reason) == (1040, "demand", "demoted")
    assert (entry.tier, entry.to, entry.layers, entry.uses) == (0, 1, (0, 4), 1)
    assert entry.terms.keys() == {"base", "uses", "layer", "position"}
    assert entry.value == pytest.approx(entry.cost / entry.idle * 1e9)
    assert (entry.tenant, entry.lora) == (b"", "")
    assert f"block={entry.block:#x}" in repr(entry)
    assert busy().evictions() == []
    with pytest.raises(ConfigError, match=r"eviction_log is 1048577"):
        two_tiers(eviction_log=2**20 + 1)


def test_what_the_log_says_of_a_victim_is_what_explain_said():
    manager = one_tier(3, eviction_log=1)
    for at in range(3):
        serve(manager, tokens(1, start=100 * at), now=10 + 10 * at)
    entries = {
        manager.lookup(tokens(1, start=100 * at), now=50, keep=0).handles[0]: at for at in range(3)
    }
    explained = {block: manager.explain(int(block), now=60) for block in entries}
    serve(manager, tokens(1, start=900), now=60)
    (left,) = manager.evictions()
    why = explained[left.block]
    assert (left.cost, left.idle, left.value) == (why.cost, why.idle, why.value)
    assert why.rank == 0
    assert left.next_value == min(e.value for e in explained.values() if e.rank == 1)


def test_it_says_what_it_is():
    stats = busy().stats()
    assert isinstance(stats, Stats)
    assert repr(stats).startswith("Stats(requests=5, hits=")
    assert repr(stats.tiers["gpu"]).startswith("TierStats(gpu: ")
