"""The benchmark of training runs on small sizes; its evaluation goes on where it stopped."""

from __future__ import annotations

import argparse
import json

import pytest
import torch

from benches.eval_train import __main__ as evaluate
from benches.train import __main__ as bench


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Such small sizes only lose by sharing their work out."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_an_evaluation_of_training_goes_on(tmp_path, capsys, monkeypatch):
    file = tmp_path / "figures.jsonl"
    words = ["--quick", "--json", "--results", str(file)]
    assert evaluate.main(words) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["what"] for row in rows] == [
        "untrained, policy",
        "untrained, dense",
        "trained, policy",
        "trained, dense",
        "points above the control",
    ]
    assert file.with_suffix(".png").exists()
    file.write_text(file.read_text() + '{"cut off')
    monkeypatch.setattr(evaluate.Evaluation, "speaker", None)  # nothing is measured again
    assert evaluate.main(words) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == rows


@pytest.mark.skipif(not bench.Path("/proc/self/clear_refs").exists(), reason="no Linux")
def test_rows_of_the_benchmark(monkeypatch):
    def here(side, times, given):
        return bench.one(side, times, given.rounds, quick=True)

    monkeypatch.setattr(bench, "apart", here)
    monkeypatch.setattr(bench, "TIMES", {4: 1.5, 16: 0.75})
    rows = bench.measure(argparse.Namespace(rounds=1, quick=True))
    by_name = {row.what: row for row in rows}
    assert {"step 4 L", "step 16 L", "memory without checkpoints, 16 L"} <= set(by_name)
    assert by_name["checkpoints, 16 L"].ok
    assert by_name["checkpoints of 8 bits, 16 L"].ok
    assert by_name["gradient's cosine, checkpoints of 8 bits"].ok
