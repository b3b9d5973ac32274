"""The bench of fusion runs, and its rows say what they should."""

import json
import sys

import pytest
import torch

from benches import fusion

pytestmark = pytest.mark.engine


def test_ways_are_compared_on_a_tiny_model(monkeypatch, capsys):
    threads = torch.get_num_threads()
    monkeypatch.setattr(fusion, "TOKENS", 32)
    monkeypatch.setattr(sys, "argv", ["fusion", "--tiny", "--rounds", "1", "--json"])
    assert fusion.main() == 0
    torch.set_num_threads(threads)
    rows = {row["what"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert {"prefix reuse", "fusion, host", "fusion, disk", "values, host"} <= set(rows)
    for row in rows.values():
        assert row["ratio"] == pytest.approx(row["peer"] / row["ours"], abs=0.01)
        assert row["ok"] == (None if row["goal"] is None else row["ratio"] >= row["goal"])
    assert rows["buffers"]["ok"]
    coded = [rows[f"KL, {name}"] for name in fusion.FORMATS]
    # Codes change the answer, and little.
    assert all(0 < abs(row["ours"] - row["peer"]) < 0.05 for row in coded)
