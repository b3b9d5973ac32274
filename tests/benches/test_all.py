"""Every bench and evaluation runs with `--quick` and prints its record."""

from __future__ import annotations

import importlib
import json

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """Such small sizes only lose by sharing their work out; benches set their own number too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def record(monkeypatch, capsys):
    """Run a module as `make` does, and read what it prints; its exit status is 0."""

    def run(module, *words):
        monkeypatch.setattr("sys.argv", [module, "--quick", "--json", *words])
        program = importlib.import_module(f"benches.{module}")
        assert not program.main()
        return json.loads(capsys.readouterr().out)

    return run


@pytest.mark.engine
def test_evaluation_of_fusion(record, tmp_path):
    words = "--even 1 --odd 1 --kinds split text --chunks 4 --chunk-tokens 32 --answer-tokens 5"
    document = record(
        "eval_fusion.__main__", *words.split(), "--results", str(tmp_path / "records.jsonl")
    )
    assert document["about"]["cases"] == {"even": 2, "odd": 2}
    reuse, *others = document["rows"]
    assert (reuse["recovered"]["mean"]["value"], reuse["computed"]) == (0, 0)
    assert {row["row"] for row in others} >= {"first+question", "values+question"}
    assert all(set(row["recovered"]) == {"mean", "split", "text"} for row in document["rows"])
    assert all(row["computed"] > 0 and row["cost"] > 0 for row in others)


def test_evaluation_of_selective_caches(record, tmp_path, monkeypatch):
    monkeypatch.setattr("benches.eval_selective.__main__.PEER", tmp_path)
    words = ["--results", str(tmp_path / "records.jsonl"), "--text", "1", "--facts", "1", "--kind"]
    record("eval_selective.__main__", *words, "text")
    rows = record("eval_selective.__main__", *words, "facts")["rows"]
    names = {(row["kind"], row["budget"], row["policy"], row["buffers"]) for row in rows}
    assert {("text", "1/4", "h2o", "default"), ("facts", "all", "dense", "default")} <= names
    assert "int8" in {buffers for *_, buffers in names}


def test_evaluation_of_training(record, tmp_path):
    words = ["--threads", "1", "--results", str(tmp_path / "records.jsonl")]
    document = record("eval_train.__main__", *words)
    assert set(document) == {"place", "rows"}
    names = [row["what"] for row in document["rows"]]
    arms = [f"{how}, {arm}" for how in ("untrained", "trained") for arm in ("policy", "dense")]
    assert names == [*arms, "points above the control"]
