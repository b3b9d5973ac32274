"""Prometheus's view: the names of docs/metrics.md, and the numbers of `stats`."""

import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from serving import MODEL, serve, tokens, two_tiers

from kvtrie import BlockManager, ConfigError, Tier
from kvtrie.metrics import KEPT_METRICS, METRICS, MISSED_METRICS, REMOTE_METRICS, Collector

PAGE = (Path(__file__).parent.parent / "docs" / "metrics.md").read_text()
ROW = re.compile(r"^\| `(kvtrie_\w+)` \|(.*)\|$", re.MULTILINE)
ALL = (*METRICS, *KEPT_METRICS, *MISSED_METRICS, *REMOTE_METRICS)


def served(machine=0):
    manager = two_tiers(gpu=2, host=4, machine=machine)
    for at in range(5):
        serve(manager, tokens(2, start=100 * at), now=10**9 * at)
    serve(manager, tokens(2, start=300), now=10**10)
    return manager


def scraped(*managers):
    """Every sample of a scrape, after it was written as text and read again."""
    registry = CollectorRegistry()
    registry.register(Collector(managers))
    families = list(text_string_to_metric_families(generate_latest(registry).decode()))
    samples = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }
    return {family.name: family for family in families}, samples


def value(samples, name, **labels):
    return samples[name, *sorted({"machine": "0", **labels}.items())]


def test_the_page_and_the_collector_name_the_same_metrics():
    rows = {name: [cell.strip() for cell in cells.split("|")] for name, cells in ROW.findall(PAGE)}
    assert list(rows) == [metric.name for metric in ALL]
    for metric in ALL:
        kind, unit, labels, vllm, sglang, meaning = rows[metric.name]
        assert (kind, labels, meaning) == (
            metric.type,
            ", ".join(metric.labels),
            metric.meaning,
        )
        assert unit not in {"", "-"}
        assert re.fullmatch(r"-|`vllm:\w+`(, `vllm:\w+`)*", vllm)
        assert re.fullmatch(r"-|`sglang:\w+`(, `sglang:\w+`)*", sglang)


def test_names_follow_the_conventions():
    for metric in ALL:
        assert metric.name.startswith("kvtrie_")
        assert metric.name.endswith("_total") == (metric.type == "counter")
        assert (metric.scale == 10**9) == ("_seconds" in metric.name)


def test_what_is_scraped_is_what_was_described():
    families, _ = scraped(served())
    described = {family.name: family for family in Collector(served()).describe()}
    assert families.keys() == described.keys()
    assert all(families[name].type == family.type for name, family in described.items())
    assert not any(family.samples for family in described.values())


def test_the_numbers_are_those_of_stats():
    manager = served()
    stats = manager.stats()
    _, samples = scraped(manager)
    assert value(samples, "kvtrie_up") == 1
    assert value(samples, "kvtrie_time_seconds") == 10
    assert value(samples, "kvtrie_requested_blocks_total") == stats.blocks_wanted == 12
    for name, lane in stats.lanes.items():
        assert value(samples, "kvtrie_lane_bytes_total", lane=name) == lane.bytes
        busy = value(samples, "kvtrie_lane_busy_seconds_total", lane=name)
        assert busy == pytest.approx(lane.busy_ns / 1e9)
        predicted = value(samples, "kvtrie_lane_predicted_seconds_total", lane=name)
        assert predicted == pytest.approx(lane.predicted_ns / 1e9)
    for tier in stats.tiers.values():
        labels = {"tier": tier.kind, "policy": tier.policy}
        for metric in METRICS:
            if metric.of and "tier" in metric.labels and len(metric.labels) == 3:
                if metric.type == "histogram":
                    times = getattr(tier, metric.of)
                    count = value(samples, f"{metric.name}_count", **labels)
                    total = value(samples, f"{metric.name}_sum", **labels)
                    assert (count, total) == (times.count, pytest.approx(times.sum / 1e9))
                else:
                    assert value(samples, metric.name, **labels) == getattr(tier, metric.of)
        for cause, count in tier.evictions.items():
            assert value(samples, "kvtrie_evictions_total", cause=cause, **labels) == count
        for kind in ("load", "store", "copy"):
            times = getattr(tier, f"{kind}_time")
            assert value(samples, "kvtrie_move_seconds_count", kind=kind, **labels) == times.count
    assert stats.tiers["host"].store_time.count > 0


def test_buckets_add_up():
    families, _ = scraped(served())
    for metric in METRICS:
        if metric.type == "histogram":
            rows = {}
            for sample in families[metric.name].samples:
                if sample.name.endswith("_bucket"):
                    key = tuple(v for k, v in sorted(sample.labels.items()) if k != "le")
                    rows.setdefault(key, []).append((float(sample.labels["le"]), sample.value))
            for row in rows.values():
                assert row == sorted(row)
                assert [count for _, count in row] == sorted(count for _, count in row)
                assert row[-1][0] == float("inf")


def test_several_managers_are_told_apart():
    one, two = served(0), served(7)
    _, samples = scraped(one, two)
    assert value(samples, "kvtrie_requests_total", machine="7") == 6
    assert value(samples, "kvtrie_requests_total") == 6
    two.close()
    _, samples = scraped(one, two)
    assert (value(samples, "kvtrie_up"), value(samples, "kvtrie_up", machine="7")) == (1, 0)
    assert not [name for name in samples if ("machine", "7") in name and name[0] != "kvtrie_up"]


def test_one_machine_is_exported_once():
    with pytest.raises(ConfigError, match=r"machines \[0, 0\]"):
        Collector([served(), served()])
    with pytest.raises(ConfigError, match=r"machines \[\]"):
        Collector([])
    alone = BlockManager(MODEL, [Tier("gpu", blocks=4)])
    assert {family.name for family in Collector(alone).collect()} >= {"kvtrie_up", "kvtrie_leases"}
