"""Runs of the simulator: figures worked out by hand."""

import json

import pytest
from hand_run import SECOND, A, B, play, write

from kvtrie.cli import main
from kvtrie.errors import ConfigError
from kvtrie.sim.config import read_config


def waits(lines):
    return [line["first_token_ns"] - line["arrival_ns"] for line in lines]


def test_the_document_of_a_run_is_the_same_to_the_byte(config, capsys):
    texts = []
    for _ in range(2):
        assert main(["sim", "run", str(config), "--json"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


def test_a_prompt_comes_back_from_the_host(config, capsys):
    figures, lines = play(config, capsys)
    assert waits(lines) == [64_000, 64_000, 3_016_000]
    assert lines[2] == {
        "id": 2,
        "machine": 0,
        "arrival_ns": 2 * SECOND,
        "first_token_ns": 2 * SECOND + 3_016_000,
        "end_ns": 2 * SECOND + 3_016_000,
        "hit_tokens": {"gpu": 0, "host": 48, "disk": 0, "peer": 0},
        "computed_tokens": 16,
    }
    assert figures["ttft_ns"] == {
        "mean": 1_048_000,
        "p50": 64_000,
        "p90": 3_016_000,
        "p99": 3_016_000,
    }
    assert (figures["requests"], figures["refused"], figures["stalled_ns"]) == (3, 0, 3_000_000)
    assert [(tier["kind"], tier["hits"]) for tier in figures["tiers"]] == [("gpu", 0), ("host", 3)]
    assert figures["lanes"]["host read"] == {
        "bytes": 3 << 14,
        "busy_ns": 3_000_000,
        "use": 3_000_000 / figures["end_ns"],
        "waited_ns": 0,
    }
    # Eight blocks are stored in two groups of four, each of which begins at once.
    assert figures["lanes"]["host store"]["waited_ns"] == 0
    assert (figures["tiers"][1]["hit_tokens"], figures["tiers"][1]["saved_ns"]) == (48, 48_000)
    assert (figures["goodput"], figures["cost"], figures["saturated"]) == (None, None, False)
    again, same = play(config, capsys)
    assert same == lines
    assert again == figures


@pytest.mark.parametrize(
    ("change", "last"),
    [
        ("engine.wait=layer", 3_004_000),
        ("manager.keep=17", 2_032_000),
        ("manager.load=plan", 64_000),
        ("tiers.1.read.bytes_per_s=32768000", 1_516_000),
        ("tiers.1.read.latency_ns=7", 3_016_007),
        ("tiers.0.write=never", 64_000),
        # An eight-bit layout halves the bytes: 3 blocks take 1.5 ms.
        ('tiers.1.layout={dtype="float8_e4m3fn"}', 1_516_000),
        ("tiers.0.admit_after=2", 64_000),
        ("tiers.0.blocks=8", 16_000),
        ("cost.alpha=1.0", 3_000_000 + 1000 * sum(range(49, 65))),
        ('cost={kind="table", points=[[0, 500], [64, 500]]}', 3_008_000),
        ("transfer=predicted", 3_016_000),
    ],
)
def test_settings_change_the_third_request(config, capsys, change, last):
    assert waits(play(config, capsys, change)[1])[2] == last


def test_blocks_are_loaded_while_a_request_waits(tmp_path, capsys):
    """A comes in while another prompt computes for 5 ms, which hides the 3 ms of its loads."""
    config = write(tmp_path, (0, A), (1, B), (2, list(range(200, 232))), (2, A))
    changes = ("tiers.0.blocks=6", "cost.ns_per_token=156250")
    figures, lines = play(config, capsys, *changes)
    assert (waits(lines)[3], figures["stalled_ns"]) == (10_500_000, 3_000_000)
    figures, lines = play(config, capsys, *changes, "prefetch=arrival")
    assert (waits(lines)[3], figures["stalled_ns"]) == (7_500_000, 0)
    assert lines[3]["hit_tokens"]["gpu"] == 48
    # Without a lower tier there is nothing to load.
    one = 'tiers=[{kind="gpu", blocks=6}]'
    assert play(config, capsys, one, "prefetch=arrival")[1] == play(config, capsys, one)[1]


def test_lanes_carry_bytes_of_the_tiers_layout(config, capsys):
    figures, _ = play(config, capsys, 'tiers.1.layout={dtype="float8_e4m3fn"}')
    assert figures["lanes"]["host read"]["bytes"] == 3 << 13


def test_lanes_report_how_long_transmissions_waited(config, capsys):
    # Predicted, each of the three blocks is a transmission of a millisecond after the others.
    for change, waited in ((), 0), (("transfer=predicted",), 3_000_000):
        assert play(config, capsys, *change)[0]["lanes"]["host read"]["waited_ns"] == waited


def test_tokens_can_be_played_one_by_one(config, capsys):
    words = ["sim", "run", str(config), "--json", "--token-by-token"]
    assert main([*words, "--set", "engine.kind=continuous"]) == 0
    assert json.loads(capsys.readouterr().out)["requests"] == 3
    assert main(words) == 2
    assert "engine.token_by_token is True" in capsys.readouterr().err


def test_a_path_starts_at_the_settings_folder(tmp_path, monkeypatch):
    config = write(tmp_path, (0, A))
    monkeypatch.chdir("/")
    assert read_config(config).trace.path == tmp_path / "t.jsonl"
    with pytest.raises(ConfigError, match="cannot read the settings"):
        read_config(tmp_path / "missing.toml")


@pytest.mark.parametrize(("shares", "last"), [(', shares="net"', 15_016_000), ("", 9_016_000)])
def test_a_prompt_comes_from_another_machine(tmp_path, capsys, shares, last):
    config = write(tmp_path, (0, A), (0, B), (1, B), (1, A))
    peers = f'peers={{lookup="all", bytes_per_s=8192000, latency_ns=0{shares}}}'
    figures, lines = play(config, capsys, "machines=2", peers)
    assert waits(lines) == [64_000, 64_000, 9_016_000, last]
    assert lines[3]["hit_tokens"] == {"gpu": 0, "host": 0, "disk": 0, "peer": 48}
    network = figures["lanes"]["peers"]
    assert (network["bytes"], network["busy_ns"]) == (6 << 14, 12_000_000)
    assert network["waited_ns"] == (6_000_000 if shares else 0)
    queues = 1 if shares else 2
    assert network["use"] == 12_000_000 / (queues * figures["end_ns"])
    assert (figures["saved_ns"]["peer"], figures["saved_ns"]["host"]) == (96_000, 0)
    assert waits(play(config, capsys, "machines=2", "peers.lookup=own")[1])[3] == 64_000


def test_requests_are_spread_over_machines(tmp_path, capsys):
    config = write(tmp_path, (0, A), (0, B), (1, A), (1, B), (2, A))
    figures, lines = play(config, capsys, "machines=2")
    assert [line["machine"] for line in lines] == [0, 1, 0, 1, 0]
    assert waits(lines) == [64_000, 64_000, 16_000, 16_000, 16_000]
    assert figures["hit_tokens"]["gpu"] == 3 * 48
    _, lines = play(config, capsys, "machines=7", "router.kind=hash")
    assert len({line["machine"] for line in lines if line["id"] in {0, 2, 4}}) == 1
