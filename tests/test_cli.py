"""The command line: what it prints, how it ends, and that it never shows a traceback."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from commands import refused, run

from kvtrie import BlockManager, LayerGroup, ModelShape, ResumePoints, Tier
from kvtrie.demo.report import Report, capture, write_report

KVTRIE = Path(sys.executable).with_name("kvtrie")


@pytest.fixture
def report(tmp_path):
    """A report in which a session is on both tiers and dropped."""
    path = tmp_path / "report.json"
    where = np.array([[0, 0, 1], [0, 1, -1], [1, 1, -1], [-1, -1, -1]], dtype=np.int8)
    counters = {"slots": 8, "free": 1, "hits": 5, "evicted_dirty": 3, "dropped": 0}
    tiers = {"gpu": counters, "host": {**counters, "hits": 6, "evicted_dirty": 0}}
    sessions = {"chat 1": where, "chat 22": np.full((4, 2), -1, dtype=np.int8)}
    write_report(path, Report("three chats", 16, 4, tiers, sessions))
    return str(path)


def test_help_names_every_command(capsys):
    status, out, _ = run(capsys, "--help")
    assert status == 0
    for command in ("demo", "replay", "map", "stats"):
        assert f"\n    {command} " in out
        assert run(capsys, command, "--help")[0] == 0


def test_no_command_and_wrong_ones_end_with_2(capsys):
    for arguments in ([], ["fly"], ["replay"], ["replay", "x", "--tier", "gpu=0"]):
        status, out, err = run(capsys, *arguments)
        assert (status, out) == (2, "")
        assert "usage: kvtrie" in err


def test_map_draws_sessions_by_layers(capsys, report):
    status, out, err = run(capsys, "map", report)
    assert (status, err) == (0, "")
    title, legend, _, head, first, second = out.splitlines()
    assert title == "three chats"
    assert legend == "█ gpu   ▓ host   · dropped"
    assert head.split() == ["laye", "blocks", "gpu", "host", "dropped"]
    # Layer 1 has one block on each tier and one dropped: the faster tier is drawn.
    assert first.split() == ["chat", "1", "██▓·", "3", "25%", "33%", "42%"]
    assert second.split() == ["chat", "22", "····", "2", "0%", "0%", "100%"]


def test_map_draws_one_session_block_by_block(capsys, report):
    status, out, _ = run(capsys, "map", report, "--session", "chat 1")
    assert status == 0
    assert out.splitlines()[-4:] == ["    3 ···", "    2 ▓▓·", "    1 █▓·", "    0 ██▓"]
    figures = json.loads(run(capsys, "map", report, "--session", "chat 1", "--json")[1])
    assert list(figures["sessions"]) == ["chat 1"]
    assert figures["sessions"]["chat 1"][1] == [0, 1, -1]
    assert figures["tiers"] == ["gpu", "host", "dropped"]
    assert "'chat 7'" in refused(capsys, "map", report, "--session", "chat 7")


def test_map_draws_a_row_per_group_of_layers(capsys, tmp_path):
    window = LayerGroup((1, 3), kind="sliding", window=9)
    model = ModelShape(4, 1, 8, groups=(LayerGroup((0, 2)), window), fingerprint="map")
    tiers = [Tier(kind, bytes="1MiB", owner="none") for kind in ("gpu", "host")]
    manager = BlockManager(model, tiers, block_tokens=4, resume=ResumePoints())
    tokens = list(range(24))
    manager.mark(tokens, "host", present=True, now=1)
    manager.mark(tokens[:12], "gpu", present=True, now=2)
    path = tmp_path / "groups.json"
    write_report(path, capture(manager, "a chat", {"chat": tokens}, now=3))
    status, out, _ = run(capsys, "map", str(path), "--session", "chat")
    assert status == 0
    # The windows at both ends of a marked sequence: two blocks each.
    assert out.splitlines()[-3:] == [
        "group",
        f"{'full:0,2':20} ███▓▓▓",
        "sliding:1,3:window=9 ·██·▓▓",
    ]
    status, out, _ = run(capsys, "map", str(path))
    assert out.splitlines()[-1].split() == ["chat", "████", "6", "42%", "42%", "17%"]
    wrong = path.read_text().replace('"full:0,2": 0', '"full:0,2": 4')
    path.write_text(wrong)
    assert "groups of layers [1, 4] of 4" in refused(capsys, "map", str(path))


def test_map_draws_a_picture(capsys, report, tmp_path):
    picture = tmp_path / "map.png"
    status, out, _ = run(capsys, "map", report, "--out", str(picture))
    assert (status, out) == (0, "")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "nowhere" in refused(capsys, "map", report, "--out", str(tmp_path / "nowhere" / "x.png"))
    assert "txtt" in refused(capsys, "map", report, "--out", str(tmp_path / "x.txtt"))


def test_stats_prints_a_row_per_tier(capsys, report):
    status, out, _ = run(capsys, "stats", report)
    assert status == 0
    head, gpu, host = (line.split() for line in out.splitlines()[-3:])
    assert dict(zip(head, gpu, strict=True))["demoted"] == "3"
    assert dict(zip(head, host, strict=True))["hits"] == "6"
    assert json.loads(run(capsys, "stats", report, "--json")[1])["tiers"]["gpu"]["hits"] == 5


@pytest.mark.parametrize("command", ["map", "stats"])
def test_what_is_no_report_is_refused(capsys, report, tmp_path, command):
    assert "No such file" in refused(capsys, command, str(tmp_path / "none"))
    good = Path(report).read_text()
    for bad in ("", "{", "[]", '{"format": "kvtrie report 1"}', good.replace("001", "0x1")):
        (tmp_path / "bad").write_text(bad)
        assert "report of kvtrie" in refused(capsys, command, str(tmp_path / "bad"))
    for broken in (good.replace("001", "00"), good.replace("001", "007")):
        (tmp_path / "bad").write_text(broken)
        assert "broken report" in refused(capsys, command, str(tmp_path / "bad"))


def test_demo_gets_its_options_and_returns_its_verdict(capsys, monkeypatch):
    import kvtrie.demo.run

    calls = []

    def stand_in(options):
        calls.append(options)
        return 1

    monkeypatch.setattr("kvtrie.demo.run.demo", stand_in)
    assert run(capsys, "demo") == (1, "", "")
    assert calls[-1] == kvtrie.demo.run.Options()
    more = "--structure leaf-only --tiny --seed 5 --answer-tokens 3 --gpu-share .5 --host-share .6"
    run(capsys, "demo", *more.split(), "--picture", "a.png", "--save", "b.json", "--json")
    assert calls[-1] == kvtrie.demo.run.Options(
        structure="leaf-only",
        tiny=True,
        seed=5,
        answer_tokens=3,
        gpu_share=0.5,
        host_share=0.6,
        picture=Path("a.png"),
        save=Path("b.json"),
        json=True,
    )
    run(capsys, "demo", "--no-picture")
    assert calls[-1].picture is None


def test_demo_names_what_is_missing(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "kvtrie.demo.run", None)
    assert "pip install 'kvtrie[demo]'" in refused(capsys, "demo", "--tiny")


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_ends_with_130_and_one_line(tmp_path):
    pipe = tmp_path / "trace.jsonl"
    os.mkfifo(pipe)
    with (
        subprocess.Popen(
            [KVTRIE, "replay", pipe], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process,
        pipe.open("w"),
    ):  # waits until the command reads
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (130, "", "Stopped.\n")


def test_a_reader_that_has_seen_enough_is_no_error(report):
    with subprocess.Popen(
        [KVTRIE, "map", report], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


def test_the_module_is_the_command():
    outputs = [
        subprocess.run([*command, "--version"], check=True, capture_output=True, text=True).stdout
        for command in ([KVTRIE], [sys.executable, "-m", "kvtrie"])
    ]
    assert outputs[0] == outputs[1]
    named = r"kvtrie [\d.]+ \(core ([0-9a-f]{12}\+?|unknown)\)\n"
    assert re.fullmatch(named, outputs[0])
