"""The bench of formats runs, and its figures say what they should."""

from __future__ import annotations

import json
import sys

from benches import formats


def test_formats_are_compared_on_a_tiny_model(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benches.formats", "--tiny", "--json"])
    monkeypatch.setattr(
        formats, "LAYOUTS", {n: formats.LAYOUTS[n] for n in ("float32", "int8, group")}
    )
    formats.main()
    rows = json.loads(capsys.readouterr().out)["formats"]
    exact, small = rows["float32"], rows["int8, group"]
    assert exact["error of logits"] < 1e-5
    assert exact["same best token"] == 1.0
    assert 1e-5 < small["error of logits"] < 0.05
    assert small["bytes of a block"] == exact["bytes of a block"] * (8 + 4) / (8 * 4)  # heads of 8
