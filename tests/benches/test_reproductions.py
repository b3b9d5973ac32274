"""Reproductions: the scenarios are as written, and what is off or missing is said."""

import json

import pytest

from benches.reproductions import __main__ as program
from benches.reproductions import mooncake, order, policies
from kvtrie.sim.trace import write_trace
from kvtrie.sim.workloads import conversations


def test_the_order_of_evictions_is_the_documents():
    rows = order.scenarios()
    assert [row.what.partition(".")[0] for row in rows] == [*["A34"] * 3, "A37", "A38", "A39"]
    assert all(row.ok for row in rows)


@pytest.mark.parametrize(("ours", "ok"), [(0.1361, True), (0.1363, False), (0.1359, False)])
def test_a_figure_is_near_or_not(ours, ok):
    assert mooncake.near("blocks", ours, 0.1361, "by hand", 0.00015).ok is ok


def test_without_the_trace_the_rest_is_played(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv(program.TRACE, raising=False)
    monkeypatch.setattr(policies, "REQUESTS", 200)
    monkeypatch.setattr("sys.argv", ["reproductions", "--json", "--out", str(tmp_path / "r.json")])
    assert program.main() == 0
    told = json.loads(capsys.readouterr().out)
    assert told == json.loads((tmp_path / "r.json").read_text())
    assert "conversation trace: left out" in told["place"]["said"][0]
    assert sum(row["what"].startswith("A41") for row in told["rows"]) == 10


def test_a_trace_is_played_by_block_and_by_token(tmp_path, monkeypatch):
    monkeypatch.setattr(mooncake, "interpreter", lambda _: None)
    write_trace(tmp_path / "trace.jsonl", conversations(seed=1))
    rows = mooncake.hits_by_block(tmp_path / "trace.jsonl")
    assert not any(row.ok for row in rows)
    tokens, said = mooncake.tokens_of_last_half(tmp_path / "trace.jsonl")
    assert [row.peer_name for row in tokens] == ["published"] * 3
    assert "not installed" in said[0]
    assert len({row.ours for row in tokens}) == 1
