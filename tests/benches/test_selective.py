"""The evaluation of selective caches runs on a random model, and goes on where it stopped."""

from __future__ import annotations

import json

from benches.eval_selective import __main__ as evaluate


def test_an_evaluation_goes_on(tmp_path, capsys, monkeypatch):
    file = tmp_path / "figures.jsonl"
    words = ["--quick", "--json", "--results", str(file)]
    assert evaluate.main(words) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    by_name = {(row["kind"], row["budget"], row["policy"], row["buffers"]): row for row in rows}
    assert ("text", "1/4", "h2o", "default") in by_name
    assert ("facts", "1/2", "dense", "default") in by_name
    assert any(buffers == "int8" for *_, buffers in by_name)
    lines = file.read_text()
    file.write_text(lines + '{"cut off')
    monkeypatch.setattr(evaluate.Evaluation, "read", None)  # nothing is measured again
    assert evaluate.main(words) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == rows
