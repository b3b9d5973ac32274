"""Metrics of the vLLM connector: counters as increases, gauges, and a line a minute in the log."""

import json

from tests.engines.vllm_engine import BLOCKS, SIZE, Engine, play

from kvtrie import BlockManager, ModelShape, Tier
from kvtrie.engines.server.format_figure import FormatFigure
from kvtrie.engines.vllm.metrics import ConnectorCounters, MetricsExporter, exported


def test_counters_are_exported_as_differences_and_add_up():
    engine, counts, sums = Engine("", 1, 0, 3), MetricsExporter(), {}
    for _ in range(3):
        play(engine, 6, 3)
        export = engine.scheduler.counts(counts)
        assert json.loads(json.dumps(export)) == export  # it travels between processes
        for name, rows in export["counters"].items():
            for label, value in rows.items():
                assert value >= 0
                sums[name, label] = sums.get((name, label), 0) + value
    engine.close()
    stats, counters = engine.scheduler.manager.stats(), engine.scheduler.cache.counters
    assert sums["vllm:kvtrie_found_tokens_total", "host"] == counters.tokens["host"] > 0
    assert sums["vllm:kvtrie_written_bytes_total", "host"] == stats.tiers["host"].bytes_written
    assert export["gauges"]["vllm:kvtrie_slots"]["gpu"] == BLOCKS


def test_slots_and_loads_are_exported_by_vllms_number_of_the_group():
    engine, prompt = Engine("", 1, 0, 0, host=8, kinds="ws"), [*range(13)]
    engine.some = lambda left, had=0: min(left, SIZE - had % SIZE)  # steps that end at borders
    for name in ("first", "again"):
        engine.add(name, prompt, 1)
        engine.drain()
    export = engine.scheduler.counts(MetricsExporter([0, 1, 2]))
    # Three blocks, the last two of them with a window, and a state.
    loaded = {"0": 3, "1": 2, "2": 1}
    assert export["counters"]["vllm:kvtrie_loaded_blocks_total"] == loaded
    stats = engine.scheduler.manager.stats()
    export = MetricsExporter([5, 3, 4]).take(stats, ConnectorCounters(), 0, 0)
    gauges = export["gauges"]["vllm:kvtrie_group_held_slots"]
    for number, slots in zip((5, 3, 4), stats.tiers["host"].groups, strict=True):
        assert gauges[f"host,{number}"] == slots.held > 0
    engine.close()


def test_counts_are_exported_once_a_second_while_a_server_is_busy():
    engine, counts = Engine("", 1, 0, 3), MetricsExporter()
    engine.scheduler.cache.clock = lambda: 5 * 10**9
    assert engine.scheduler.counts(counts) is not None
    assert engine.scheduler.counts(counts) is not None  # idle: its next step may be far
    engine.add("busy", [1, 2, 3, 4, 5], 9)
    engine.step()
    assert engine.scheduler.counts(counts) is None
    engine.scheduler.cache.clock = lambda: 7 * 10**9
    assert engine.scheduler.counts(counts) is not None
    engine.drain()
    engine.close()


def test_every_count_has_one_name_and_is_exported():
    names = [count.name for count in exported()]
    assert len(set(names)) == len(names)
    assert all((count.type == "counter") == count.name.endswith("_total") for count in exported())
    model = ModelShape(layers=2, kv_heads=2, head_dim=8)
    manager = BlockManager(model, [Tier("gpu", blocks=4), Tier("host", blocks=4)])
    figure = FormatFigure("int8", 2e-4, 0.53)
    values = MetricsExporter().take(manager.stats(), ConnectorCounters(), 0, 0, figures=[figure])
    assert values["gauges"]["vllm:kvtrie_format_kl_nats"] == {"int8": 2e-4}
    by_name = {count.name: count for count in exported()}
    for kind in ("counters", "gauges"):
        for name, rows in values[kind].items():
            assert by_name[name].type == kind.removesuffix("s")
            assert (list(rows) != [""]) == bool(by_name[name].labels)


def test_the_minutes_line_has_hits_by_tier_and_reasons_of_losses(caplog):
    engine = Engine("", 1, 0, 0, host=2)
    now = [60 * 10**9]
    engine.scheduler.cache.clock = lambda: now[0]
    caplog.set_level("INFO", "vllm.kvtrie")
    play(engine, 12, 0)
    assert not caplog.messages
    now[0] += 60 * 10**9
    engine.add("last", range(1, 9), 1)
    engine.drain()
    (line,) = [line for line in caplog.messages if line.startswith("kvtrie: tokens asked")]
    assert "lost no room on host" in line
    assert "tokens host" in line
    engine.close()
