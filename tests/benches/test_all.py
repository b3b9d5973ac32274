"""Every bench and evaluation runs with `--quick` and prints its record.

Not run here: `against` builds two versions, `instructions` needs valgrind, `disk` needs fio,
`engines` needs vLLM, `limit` a prototype, `sim` a published trace, `sim.demo` some minutes.
"""

from __future__ import annotations

import importlib
import io
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch

from benches.core.referee import parse
from benches.record import NO_PEER
from kvtrie.sim.trace import write_trace
from kvtrie.sim.workloads import conversations


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


@pytest.fixture
def in_process(monkeypatch):
    """Let a bench play its drivers in this process: an interpreter for each takes long to start."""

    def play(driver):
        monkeypatch.setattr("sys.argv", [driver.module, *driver.arguments])
        with redirect_stdout(io.StringIO()) as printed:
            importlib.import_module(driver.module).main()
        return parse(printed.getvalue().splitlines())

    return lambda module: monkeypatch.setattr(f"benches.{module}.run", play)


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


@pytest.mark.engine
def test_fusion(record):
    rows = {row["what"]: row for row in record("fusion")["rows"]}
    assert {"prefix reuse", "fusion, host", "fusion, disk", "values, host"} <= set(rows)
    assert rows["buffers"]["ok"]
    # Codes change the answer, and little.
    coded = [row for what, row in rows.items() if what.startswith("KL, ")]
    assert coded
    assert all(0 < abs(row["ours"] - row["peer"]) < 0.05 for row in coded)


def test_formats(record):
    formats = record("formats")["formats"]
    exact, small = formats["float32"], formats["int8, group"]
    assert exact["error of logits"] < 1e-5 < small["error of logits"] < 0.05
    assert exact["same best token"] == 1.0
    assert small["bytes of a block"] == exact["bytes of a block"] * (8 + 4) / (8 * 4)  # heads of 8


@pytest.mark.skipif(sys.platform != "linux", reason="peaks of memory are read from Linux's /proc")
def test_selective_caches(record):
    rows = {row["what"]: row for row in record("selective.__main__")["rows"]}
    assert rows["memory of a value, int8"]["ours"] < rows["memory of a value, default"]["ours"]
    assert {"attend, geometric mean", "full cache, h2o-default, a step of 1"} <= set(rows)


@pytest.mark.skipif(sys.platform != "linux", reason="peaks of memory are read from Linux's /proc")
def test_training(record):
    rows = {row["what"]: row for row in record("train.__main__")["rows"]}
    assert {"step 4 L", "step 16 L", "memory without checkpoints, 16 L"} <= set(rows)
    assert rows["checkpoints, 16 L"]["ok"]
    assert rows["checkpoints of 8 bits, 16 L"]["ok"]
    assert rows["gradient's cosine, checkpoints of 8 bits"]["ok"]


def test_hybrid(record):
    rows = {row["what"]: row for row in record("hybrid.__main__")["rows"]}
    assert rows["formula gemma-3-27b: 8192 tokens"]["ok"]
    assert rows["all layers gpt-oss-120b: 8192 tokens"]["ok"]
    assert rows["agents gemma-3-27b 32GiB"]["ours"] > rows["agents gemma-3-27b 32GiB"]["peer"]
    first = rows["first token: second turn, qwen3-next tiny"]
    assert (first["more"]["found"], first["more"]["tokens"]) == (192, 256)
    assert {
        "core three groups: per request",
        "memory: per further group and resident block",
    } <= set(rows)


def test_core(record, in_process):
    in_process("core.__main__")
    rows = record("core.__main__")["rows"]
    played = {row["what"]: row["ours"] for row in rows if row["ours"] is not None}
    assert {row["peer_name"] for row in rows} == {NO_PEER, "request.retention"}
    assert all(value > 0 for what, value in played.items() if not what.startswith("memory"))
    left = {row["more"]["game"] for row in rows if row["what"] not in played}
    assert left == {"victim", "plan"}  # criterion's


def test_transfer(record, in_process):
    in_process("transfer")
    rows = record("transfer")["rows"]
    assert len(rows) == 6
    assert {row["peer_name"] for row in rows} == {"naive dictionary"}


def test_scaling(record, tmp_path, monkeypatch, capsys):
    picture, out = tmp_path / "scaling.png", tmp_path / "scaling.json"
    document = record("scaling", "--picture", str(picture), "--out", str(out))
    assert json.loads(out.read_text()) == document
    assert [row["blocks"] for row in document["rows"]] == [1024, 2048]
    assert set(document["worst_call"]["calls"]) == {"acquire", "commit", "release"}
    assert [row["beside"] for row in document["crowds"]] == [10, 30]
    drawn = picture.read_bytes()
    picture.unlink()
    monkeypatch.setattr(
        "sys.argv", ["scaling", "--redraw", "--out", str(out), "--picture", str(picture)]
    )
    assert importlib.import_module("benches.scaling").main() == 0
    assert picture.read_bytes() == drawn
    monkeypatch.setattr("sys.argv", ["scaling", "--sizes", "100"])
    with pytest.raises(SystemExit):
        importlib.import_module("benches.scaling").main()
    assert "100 blocks: at least 512 are needed" in capsys.readouterr().err


def test_reproductions(record, monkeypatch):
    monkeypatch.delenv("KVTRIE_TRACE", raising=False)
    document = record(
        "reproductions.__main__"
    )  # its status says that all orders are published ones
    assert "conversation trace: left out" in document["place"]["said"][0]
    assert sum(row["what"].startswith("A41") for row in document["rows"]) == 10


def test_policies(record):
    document = record("policies.__main__", "--workers", "1")
    assert {row["policy"] for row in document["rows"]} >= {"learned", "lru", "flat", "retention"}
    assert document["goals"]


def test_the_simulator_is_measured_by_machines(tmp_path, monkeypatch, capsys):
    write_trace(tmp_path / "trace.jsonl", conversations(seed=2))
    monkeypatch.setattr("sys.argv", ["simulation", str(tmp_path / "trace.jsonl")])
    importlib.import_module("benches.ours.simulation").main()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    goals = importlib.import_module("benches.sim.__main__").GOALS
    assert [line["what"] for line in lines] == list(goals)
    assert all(line["value"] > 0 and line["found"] > 0 for line in lines)


def test_gpu(record, monkeypatch, capsys):
    document = record("gpu.__main__")
    assert document["stopped"] == {}
    parts = [document[name] for name in ("bandwidth", "link", "overlap", "attention")]
    assert all(row["figure"] > 0 for part in parts for row in part)
    if not torch.cuda.is_available():
        program = importlib.import_module("benches.gpu.__main__")
        monkeypatch.setattr("sys.argv", ["gpu"])
        assert program.main() == 0
        assert capsys.readouterr().out == "not run: no CUDA device\n"


def test_remote(record):
    rows = record("remote")["rows"]
    assert {row["what"] for row in rows} >= {"folder get 1 MiB", "host hit, store hangs", "keys"}
    assert all(row["ours"] > 0 and row["peer"] > 0 for row in rows)


def test_restart(record):
    document = record("restart")
    assert document["blocks"] == 1000
    assert all(part["seconds"] > 0 for part in document["parts"].values())


def test_import_time(record):
    assert set(record("import_time")["ms"]) == {"numpy", "kvtrie"}


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the soak runs on Linux")
def test_soak(record):
    document = record("soak.__main__")
    assert document["ok"]
    assert document["end"]["requests"] == 300
    assert document["end"]["read"] > 0
    assert [*document["warm"]["hits"]] == ["gpu", "host", "disk"]
    assert len(document["minutes"]) == 5  # one for sixty requests
