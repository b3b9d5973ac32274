"""Reports of a server about kvtrie: statistics, Prometheus, KV events, the log line per minute."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import msgspec
import pytest
import servers
from servers import BLOCK, prompt, serve

from kvtrie.engines.vllm.metrics import exported

EXAMPLE = Path(__file__).parents[2] / "examples" / "observability"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return servers.tiny_llama(tmp_path_factory.mktemp("llama"))


def disk(folder, blocks=9):
    return {
        "tiers": [
            {"kind": "host", "blocks": blocks},
            {"kind": "disk", "blocks": 512, "path": str(folder)},
        ],
        "events": True,
    }


@pytest.fixture
def scraped():
    """Samples that Prometheus would scrape in this process, by name and labels."""
    from prometheus_client import REGISTRY

    def read():
        return {
            (sample.name, *sorted(sample.labels.items())): sample.value
            for family in REGISTRY.collect()
            for sample in family.samples
        }

    return read


def of(scrape, name, **labels):
    """The sum of a name's samples with these labels."""
    return sum(
        value
        for (found, *has), value in scrape.items()
        if found == name and set(labels.items()) <= set(has)
    )


def test_prometheus_and_statistics(model, tmp_path, scraped):
    with serve(model, disk(tmp_path), disable_log_stats=False) as server:
        for seed in (0, 1, 0, 1):
            server.answers([prompt(seed, 200)])
            server.wait_for_stores()
            server.forget()
        server.answers([prompt(2, 40)])  # one more step reports the last counts
        scrape, scheduler = scraped(), server.kv_scheduler
        for tier in ("host", "disk"):
            name = "vllm:kvtrie_found_tokens_total"
            assert of(scrape, name, tier=tier) == scheduler.cache.counters.tokens[tier]
        tokens = scheduler.cache.counters.tokens
        assert tokens["disk"] + tokens["host"] == 2 * 6 * BLOCK
        assert of(scrape, "vllm:kvtrie_slots", tier="disk") == 512
        assert of(scrape, "vllm:kvtrie_written_bytes_total", tier="disk") > 0
        names = {name for name, *_ in scrape}
        labelled = {count.name for count in exported() if not count.labels}
        assert labelled <= names
        queries(names)


@pytest.mark.since("0.32")
def test_prometheus_counts_by_group_of_layers(tmp_path, scraped):
    model, extra = servers.tiny_gemma(tmp_path), {"tiers": [{"kind": "host", "bytes": "64MB"}]}
    with serve(model, extra, disable_log_stats=False) as server:
        for _ in range(2):
            server.answers([prompt(0, 200)])
            server.wait_for_stores()
            server.forget()
        server.answers([prompt(2, 20)])  # one more step reports the last counts
        scrape, stats = scraped(), server.kv_scheduler.manager.stats().tiers["host"]
        groups = zip(server.core.scheduler.connector._model.groups, stats.groups, strict=True)
        for group, slots in groups:
            labels = {"tier": "host", "group": f"{group.number}"}
            assert of(scrape, "vllm:kvtrie_group_held_slots", **labels) == slots.held > 0
        # Six blocks of all tokens, and a window of 64 tokens.
        loaded = [
            of(scrape, "vllm:kvtrie_loaded_blocks_total", group=number) for number in ("0", "1")
        ]
        assert loaded == [2, 6]


def queries(names):
    """Every metric in the dashboard's and the alerts' queries is one that was scraped."""
    board = json.loads((EXAMPLE / "dashboard.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    queries.append((EXAMPLE / "alerts.yml").read_text())
    used = set(re.findall(r"vllm:\w+", " ".join(queries)))
    never = {count.name for count in exported() if count.labels == ("reason",)}  # nothing was lost
    assert len(used) > 10
    assert used - names <= never


def test_events_list_the_blocks_on_host_and_disk(model, tmp_path, monkeypatch):
    from vllm.distributed.kv_events import BlockStored, EventBatch, KVEventBatch, NullEventPublisher

    published, resident = [], {"CPU": set(), "STORAGE": set()}
    monkeypatch.setattr(
        NullEventPublisher, "publish", lambda _, batch: published.append(batch), raising=False
    )
    with serve(model, disk(tmp_path)) as server:
        prompts = [prompt(seed, 200) for seed in range(3)]
        for each in prompts:
            server.answers([each])
            server.wait_for_stores()
        server.core.step_fn()
        batch = EventBatch(0.0, [event for each in published for event in each.events])
        data = msgspec.msgpack.encode(batch)  # as a subscriber reads it
        for event in msgspec.msgpack.decode(data, type=KVEventBatch).events:
            keys = set(event.block_hashes)
            if isinstance(event, BlockStored):
                assert event.block_size == BLOCK
                assert len(event.token_ids) == BLOCK * len(event.block_hashes)
                resident[event.medium] |= keys
            elif event.medium in resident:
                resident[event.medium] -= keys
        stats = server.kv_scheduler.manager.stats()
        assert len(resident["CPU"]) == stats.tiers["host"].copies
        assert len(resident["STORAGE"]) == stats.tiers["disk"].copies >= 18
        first = [event for event in batch.events if getattr(event, "medium", "") == "STORAGE"]
        prompts_published = [
            event.token_ids[:BLOCK] for event in first if event.parent_block_hash is None
        ]
        assert prompts_published == [each[:BLOCK] for each in prompts]


def test_the_minutes_line_is_in_the_servers_log(model):
    lines, handler = [], logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("vllm.kvtrie")
    logger.addHandler(handler)
    logger.setLevel("INFO")
    try:
        with serve(model, {"tiers": [{"kind": "host", "blocks": 3}]}) as server:
            now = [60 * 10**9]
            server.kv_scheduler.cache.clock = lambda: now[0]
            for _ in range(2):
                server.answers([prompt(0, 200)])
                server.wait_for_stores()
                server.forget()
                now[0] += 61 * 10**9
            server.answers([prompt(0, 40)])
    finally:
        logger.removeHandler(handler)
        logger.setLevel("NOTSET")
    line = " ".join(line for line in lines if "tokens asked" in line)
    assert "lost no room on host" in line
    assert "tokens host" in line
