"""`kvtrie replay`: figures, several policies, session ends, pictures, and what it refuses."""

import dataclasses
import json

import pytest
from commands import refused, run

from kvtrie import Tier
from kvtrie.sim.replay import open_manager, replay
from kvtrie.sim.trace import write_trace
from kvtrie.sim.workloads import conversations

TRACE = conversations(seed=2, chats=60)
SMALL = ("--tier", "gpu=30", "--tier", "host=60")


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    write_trace(path, TRACE)
    return str(path)


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


def test_replay_prints_the_last_evictions(capsys, trace):
    status, out, _ = run(capsys, "replay", trace, *SMALL, "--evictions", "4")
    assert status == 0
    head, *rows = out.splitlines()[-5:]
    assert head.split()[:5] == ["at", "s", "block", "position", "tier"]
    assert len(rows) == 4
    replayed = json.loads(run(capsys, "replay", trace, *SMALL, "--evictions", "4", "--json")[1])
    assert [f"{entry['block']:#x}" for entry in replayed["last_evictions"]] == [
        row.split()[1] for row in rows
    ]
    assert {entry["cause"] for entry in replayed["last_evictions"]} == {"demand"}
    assert "last_evictions" not in json.loads(run(capsys, "replay", trace, *SMALL, "--json")[1])
    assert "eviction_log is -1" in refused(capsys, "replay", trace, "--evictions", "-1")
