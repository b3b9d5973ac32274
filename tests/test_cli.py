"""The command line: what it prints, how it ends, and that it never shows a traceback."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvtrie import BlockManager, ModelShape, Tier
from kvtrie.cli import main
from kvtrie.demo.report import Report, capture, read_report, write_report
from kvtrie.errors import ConfigError
from kvtrie.sim.replay import open_manager, replay
from kvtrie.sim.trace import write_trace
from kvtrie.sim.workloads import conversations

KVTRIE = Path(sys.executable).with_name("kvtrie")
TRACE = conversations(seed=2, chats=60)


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    write_trace(path, TRACE)
    return str(path)


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


def run(capsys, *arguments):
    """Exit status, standard output and error of one command."""
    try:
        status = main(arguments)
    except SystemExit as ended:
        status = ended.code
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def refused(capsys, *arguments):
    """The one line with which a command is refused."""
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    return err


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


def test_replay_prints_the_figures_of_the_replay(capsys, trace):
    tiers = [Tier("gpu", blocks=30), Tier("host", blocks=40)]
    played = replay(TRACE, open_manager(tiers, policy="lru"))
    arguments = ["replay", trace, "--tier", "gpu=30", "--tier", "host=40", "--policy", "lru"]
    status, out, err = run(capsys, *arguments, "--json")
    assert (status, err) == (0, "")
    figures = json.loads(out)
    assert figures["hits"] == played.hits > 0
    assert figures["hit_rate"] == played.hit_rate
    assert figures["evictions"] == played.evictions
    assert [tier["hits"] for tier in figures["tiers"]] == [tier.hits for tier in played.tiers]
    assert (figures["policy"], figures["structure"], figures["block_tokens"]) == (
        "lru",
        "leaf-only",
        512,
    )
    status, out, _ = run(capsys, *arguments)
    assert status == 0
    assert f"prefix hits {played.hit_rate:.4f} ({played.hits} blocks)" in out
    gpu, host = (line.split() for line in out.splitlines()[5:7])
    assert [gpu[:3], host[:3]] == [
        ["gpu", "30", str(played.tiers[0].hits)],
        ["host", "40", str(played.tiers[1].hits)],
    ]


def test_replay_prints_evicted_blocks_and_hits_by_turn(capsys, trace):
    played = replay(TRACE, open_manager([Tier("gpu", blocks=30)]))
    figures = json.loads(run(capsys, "replay", trace, "--tier", "gpu=30", "--json")[1])
    assert figures["evicted"] == played.evicted > 0
    assert figures["bound"] == (played.hits + played.evicted) / played.blocks
    assert [row["turn"] for row in figures["turns"]] == list(range(1, len(figures["turns"]) + 1))
    assert sum(row["hits"] for row in figures["turns"]) == played.hits
    out = run(capsys, "replay", trace, "--tier", "gpu=30")[1]
    assert f"not found: {played.evicted} blocks that had been evicted" in out
    assert f"with room for all prefix hits {played.bound:.4f}" in out


def test_replay_compares_policies_over_rooms(capsys, trace, tmp_path):
    picture = tmp_path / "rooms.png"
    arguments = ["replay", trace, "--policy", "learned,flat", "--rooms", "30,90"]
    figures = json.loads(run(capsys, *arguments, "--json", "--plot", str(picture))[1])
    rows = {(row["policy"], row["room"]): row for row in figures["rows"]}
    policies = ["learned", "flat", "lru", "belady, leaves"]
    assert list(rows) == [(policy, room) for policy in policies for room in (30, 90)]
    played = replay(TRACE, open_manager([Tier("gpu", blocks=30)], policy="flat"))
    assert rows["flat", 30]["cost_saved"] == played.cost_rate
    assert rows["flat", 30]["hits"] == played.hit_rate
    assert rows["belady, leaves", 30]["hits"] > rows["lru", 30]["hits"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    out = run(capsys, *arguments)[1]
    assert [line.split()[0] for line in out.splitlines()[3:]] == [
        "learned",
        "flat",
        "lru",
        "belady,",
    ]
    rows = json.loads(run(capsys, *arguments[:-1], "1", "--json")[1])["rows"]
    assert all(row["hits"] < 0.1 for row in rows)
    assert "--tier goes with one policy" in refused(capsys, *arguments, "--tier", "gpu=9")
    assert "--rooms goes with several" in refused(capsys, "replay", trace, "--rooms", "9")


def test_replay_ends_sessions_where_they_have_names(capsys, trace, tmp_path):
    assert "names its session" in refused(capsys, "replay", trace, "--ends")
    named = tmp_path / "named.jsonl"
    write_trace(named, [dataclasses.replace(r, session="all") for r in TRACE])
    plain = json.loads(run(capsys, "replay", str(named), "--json")[1])
    figures = json.loads(run(capsys, "replay", str(named), "--ends", "--json")[1])
    assert (plain["ends"], figures["ends"]) == (False, True)
    assert figures["hits"] == plain["hits"]


def test_replay_refuses_in_one_line(capsys, trace, tmp_path):
    assert "nowhere.jsonl: No such file" in refused(capsys, "replay", "nowhere.jsonl")
    assert "'best'" in refused(capsys, "replay", trace, "--policy", "best")
    assert "block_tokens" in refused(capsys, "replay", trace, "--block-tokens", "-1")
    with open(trace, "a", encoding="utf-8") as file:  # noqa: PTH123 - to append
        file.write("{}\n")
    assert f"line {len(TRACE) + 1}" in refused(capsys, "replay", trace)
    status, out, err = run(capsys, "replay", trace, "--tier", "cloud=4")
    assert (status, out) == (2, "")
    assert err.splitlines()[-1].endswith("gpu, host, disk, remote, not 'cloud'")
    assert not list(tmp_path.glob("*.json"))


def test_a_replay_can_be_drawn(capsys, trace, tmp_path):
    saved = str(tmp_path / "replay.json")
    assert run(capsys, "replay", trace, "--tier", "gpu=30", "--save", saved)[0] == 0
    status, out, _ = run(capsys, "map", saved)
    assert status == 0
    rows = [line for line in out.splitlines() if line.startswith("request ")]
    assert len(rows) == 24
    assert rows[-1].startswith(f"request {len(TRACE)} ")
    assert "█" * 32 in rows[-1]
    assert "·" * 32 in out
    status, out, _ = run(capsys, "stats", saved, "--json")
    assert json.loads(out)["tiers"]["gpu"]["slots"] == 30


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


def test_a_report_names_the_tier_of_every_block(tmp_path):
    model = ModelShape(layers=3, kv_heads=1, head_dim=1)
    manager = BlockManager(model, [Tier("gpu", blocks=3), Tier("host", blocks=2)], block_tokens=2)
    for start in (0, 10):
        tokens = range(start, start + 5)
        lease = manager.acquire(tokens, now=start)
        manager.complete(manager.moves().id, now=start)
        lease.commit(tokens, now=start)
        lease.release()
    taken = capture(manager, "two", {"old": list(range(5)), "new": list(range(10, 15))}, 20)
    # Room for three blocks: the tail of the old one had to make way for the new one's open block.
    assert taken.sessions["old"].tolist() == [[1, 1]] * 3
    assert taken.sessions["new"].tolist() == [[0, 0]] * 3
    assert taken.tiers["gpu"]["evicted_dirty"] == 2
    path = tmp_path / "report.json"
    write_report(path, taken)
    read = read_report(path)
    assert (read.title, read.block_tokens, read.layers) == ("two", 2, 3)
    assert read.tiers == taken.tiers
    assert {name: where.tolist() for name, where in read.sessions.items()} == {
        name: where.tolist() for name, where in taken.sessions.items()
    }
    with pytest.raises(ConfigError, match="cannot write"):
        write_report(tmp_path / "nowhere" / "report.json", taken)


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
        out, err = process.communicate(timeout=30)
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
    assert outputs[0] == outputs[1] != ""
