"""The line that a vLLM server logs at its start, from what its workers have opened."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from vllm_engine import BLOCKS, SIZE, Engine, served

from kvtrie.engines.server.format_figure import FormatFigure
from kvtrie.engines.vllm.settings import Settings
from kvtrie.engines.vllm.start_line import log_start

HOST, DISK = 6, 64


def lines(caplog, engine, folder, *, format_="native", disk=None, figures=(), **more):
    """The lines of a server over these workers."""
    rows = [{"kind": "host", "blocks": HOST}]
    if folder:
        rows.append({"kind": "disk", "blocks": DISK, "path": str(folder)})
    model = served("ab", **{"ranks": 1, "stages": 1, "replicated": False} | more)
    opened = {rank: worker.opened() for rank, worker in enumerate(engine.workers)}
    caplog.clear()
    caplog.set_level("INFO", "vllm.kvtrie")
    rows[0]["format"] = format_
    if disk is not None:
        rows[1]["format"] = disk
    settings, manager = Settings.read({"tiers": rows}), engine.scheduler.manager
    log_start(settings, model, opened, manager, figures=figures)
    return [(record.levelname, record.getMessage()) for record in caplog.records]


def test_one_line_and_a_warning_about_a_host_smaller_than_the_gpu_cache(caplog):
    engine = Engine("", 1, 1, 0)
    line, small = lines(caplog, engine, "")
    tokens = HOST * SIZE
    assert line == (
        "INFO",
        # A block has 1 KiB: 2 layers, 4 tokens, 2 heads, K and V of 8 numbers, float32.
        f"kvtrie: host 6.0 KiB = {tokens} tokens; block {SIZE} tokens; 1 rank; policy learned",
    )
    assert small[0] == "WARNING"
    assert f"{HOST} blocks and the GPU cache {BLOCKS}" in small[1]


def test_a_format_is_logged_with_its_cost_and_the_bytes_that_it_takes(caplog):
    engine = Engine("", 1, 1, 0)
    figure = FormatFigure("int8", 2e-4, 0.53)
    cost, line, _ = lines(caplog, engine, "", format_="int8", figures=[figure])
    assert cost == ("INFO", figure.text())
    # A block has 384 bytes: 2 layers, 4 tokens, 2 heads, K and V of 8 codes and a scale.
    assert line[1].startswith("kvtrie: host 2.2 KiB")
    (level, said), *_ = lines(caplog, engine, "", format_="int8", figures=[FormatFigure("int8")])
    assert level == "WARNING"
    assert "was not measured" in said


def test_a_disk_in_fewer_bits_is_logged_with_its_own_bytes_and_cost(caplog, tmp_path):
    engine = Engine(tmp_path, 1, 1, 0)
    figures = [FormatFigure("int8", 2e-4, 0.53, "the disk")]
    cost, line, *_ = lines(caplog, engine, tmp_path, disk="int8", figures=figures)
    assert cost == ("INFO", figures[0].text())
    assert "KV of the disk is in int8, 0.530 of bfloat16's bytes: mean KL" in cost[1]
    # A block has 1 KiB on host and 384 bytes on disk.
    assert line[1].startswith("kvtrie: host 6.0 KiB")
    assert "disk 24.0 KiB" in line[1]
    engine.close()


def test_groups_that_share_bytes_are_logged_with_the_room_of_each(caplog, tmp_path):
    first = Engine(tmp_path, 1, 1, 0, kinds="ws")
    line = lines(caplog, first, tmp_path, kinds="ws")[0][1]
    # A block has 1 KiB of the first group, and half of that with a window; a state has 64 bytes.
    rooms = (
        f"{36 * SIZE} tokens of group 0 or {72 * SIZE} tokens of group 1 or 576 states of group 2"
    )
    assert line.startswith(f"kvtrie: host 36.0 KiB = {rooms}; disk ")
    assert "states of group 2, 0 % filled by an earlier run; block" in line
    first.some = lambda left, had=0: min(left, SIZE - had % SIZE)  # steps that end at borders
    first.add("a", range(13), 1)
    first.drain()
    first.close()
    second = Engine(tmp_path, 1, 1, 0, kinds="ws")
    assert "states of group 2, 4 % filled by" in lines(caplog, second, tmp_path, kinds="ws")[0][1]
    second.close()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_restart_logs_how_full_the_disk_is(caplog, tmp_path, ranks):
    draw = random.Random(1)
    with_disk = Engine(tmp_path, ranks, 1, 0)
    first = lines(caplog, with_disk, tmp_path, ranks=ranks)[0][1]
    assert "0 % filled by an earlier run;" in first
    assert f"{ranks} rank" in first
    assert (f"({ranks} x " in first) == (ranks > 1)
    for at in range(4):
        with_disk.add(f"{at}", [draw.randrange(250) for _ in range(4 * SIZE)], 1)
    with_disk.drain()
    with_disk.close()
    other = Engine(tmp_path, ranks, 1, 0)
    stats = other.scheduler.manager.stats().tiers["disk"]
    assert (stored := stats.slots - stats.free) > 4
    second = lines(caplog, other, tmp_path, ranks=ranks)[0][1]
    assert f"{100 * stored // DISK} % filled by an earlier run;" in second
    other.close()


def test_blocks_of_another_model_are_counted(caplog, tmp_path):
    engine = Engine(tmp_path, 1, 1, 0)
    opened = {0: replace(engine.workers[0].opened(), others=1204)}
    engine.workers[0].opened = lambda: opened[0]
    assert "(1 204 blocks of another model ignored)" in lines(caplog, engine, tmp_path)[0][1]
    engine.close()
