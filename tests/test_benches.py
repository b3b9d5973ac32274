"""Benches: each runs with `--quick` and prints its record; records, pages and pictures agree.

`against`, `instructions`, `disk`, `engines`, `eval_advise`, `eval_why`, `sim` and `sim.demo` need a
build, valgrind, fio, vLLM, a published trace or minutes: their records in `benches/results` are
read.
"""

from __future__ import annotations

import gc
import importlib
import io
import json
import re
import subprocess
import sys
import tomllib
from contextlib import closing, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from benches import against, evaluation, pages, pictures, sharing, tables
from benches.core import referee, report
from benches.core.goals import GOALS
from benches.core.rows import GAMES, OURS, Game, Play
from benches.core.rows import Row as CoreRow
from benches.engines.answers import TIE, compare
from benches.eval_fusion.cases import Sizes, case_of
from benches.eval_fusion.settings import Setting
from benches.eval_fusion.trial import Trial
from benches.eval_selective.beside import Beside
from benches.gpu import check
from benches.ours import rust
from benches.policies import __main__ as policies
from benches.policies.cells import Row
from benches.record import bounded
from benches.soak import __main__ as soak
from benches.workload import BLOCK, SYSTEM_TOKENS, Trace
from kvtrie.demo.model import tiny
from kvtrie.selective import CacheSettings, SelectiveCache
from kvtrie.tiers import Pool

ROOT = Path(__file__).parents[1]
COLUMNS = {"what", "ours", "peer", "peer_name", "unit", "ratio", "goal", "ok", "more"}
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's /proc")
DEEP = pytest.mark.deep  # ten seconds


@pytest.fixture(autouse=True)
def process():
    """One thread: small sizes only lose by sharing their work out. Benches freeze garbage."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    gc.unfreeze()


@pytest.fixture
def record(monkeypatch, capsys):
    """Run a module as `make` does, and read what it prints; its exit status is 0."""

    def play(driver):
        """Play a driver in this process: an interpreter for each takes long to start."""
        monkeypatch.setattr("sys.argv", [driver.module, *driver.arguments])
        with redirect_stdout(io.StringIO()) as printed:
            importlib.import_module(driver.module).main()
        return referee.parse(printed.getvalue().splitlines())

    def run(module, *words):
        program = importlib.import_module(f"benches.{module}")
        if module in {"core.__main__", "transfer"}:
            monkeypatch.setattr(program, "run", play)
        monkeypatch.setattr("sys.argv", [module, "--quick", "--json", *words])
        assert not program.main()
        return json.loads(capsys.readouterr().out)

    return run


BENCHES = [
    ("core.__main__", "", {"request", "lookup.mean", "evict.lru", "decode", "memory.tiers_1"}),
    ("transfer", "", set()),
    ("cluster", "", {"events encode", "events overhead"}),
    ("remote", "", {"folder get 1 MiB", "host hit, store hangs", "keys"}),
    ("reproductions.__main__", "", set()),
    ("sim.store", "", {"4 machines, locality", "4 machines, score, shared store"}),
    ("sim.reading", "", {"compact", "Mooncake's lines"}),
    ("sim.curves", "", {"common, lru"}),
    ("sim.progress", "", {"host 100, learned, reports", "goal: host 100, below lru"}),
    ("sim.prefetch", "", {"host 100, prefetch", "goal: host 100, below progress"}),
    ("sharing", "", {"attack: share_after=3, 2 accounts", "attack: share_after=3, 3 accounts"}),
    ("hybrid.__main__", "", {"core three groups: per request"}),
    pytest.param("fusion", "", {"prefix reuse", "fusion, disk"}, marks=pytest.mark.engine),
    pytest.param("selective.__main__", "", {"attend, geometric mean"}, marks=[LINUX, DEEP]),
    pytest.param(
        "train.__main__", "", {"step 4 L", "checkpoints of 8 bits, 16 L"}, marks=[LINUX, DEEP]
    ),
    pytest.param(
        "eval_train.__main__",
        "--threads 1 --results FILE",
        {"points above the control"},
        marks=DEEP,
    ),
]
"""Modules whose records are rows of `benches.record`: arguments, and names of some rows."""


@pytest.mark.parametrize(("module", "words", "names"), BENCHES)
def test_a_quick_bench_prints_a_record_of_the_common_form(record, tmp_path, module, words, names):
    document = record(module, *words.replace("FILE", str(tmp_path / "records.jsonl")).split())
    assert set(document) == {"place", "rows"}
    assert {"date", "cpu", "cores", "load"} <= document["place"].keys()
    rows = {row["what"]: row for row in document["rows"]}
    assert rows
    assert names <= set(rows)
    for what, row in rows.items():
        assert set(row) == COLUMNS, what


def test_a_prober_finds_secrets_with_k_accounts_and_none_with_fewer():
    found = {row.what: row for row in sharing.attacks(3)}
    for k in sharing.AFTER:
        *below, full = (found[f"attack: share_after={k}, {n} accounts"] for n in range(1, k + 1))
        assert all(row.ok for row in below)
        assert full.ours == 1
    assert found["attack: share all, 1 accounts"].ours == 1


def test_other_quick_benches_print_their_figures(record, tmp_path):
    small = record("formats")["formats"]["int8, group"]
    assert small["bytes of a block"] > 0
    assert record("restart")["blocks"] == 1000
    assert set(record("import_time")["ms"]) == {"numpy", "numpy, kvtrie"}
    assert record("gpu.__main__")["stopped"] == {}
    grown = record("scaling", "--picture", str(tmp_path / "scaling.png"))
    assert [row["blocks"] for row in grown["rows"]] == [1024, 2048]
    assert grown["worst_call"]


@pytest.mark.engine
def test_quick_evaluations_print_intervals_and_goals(record, tmp_path, monkeypatch):
    words = "--even 1 --odd 1 --kinds split text --chunks 4 --chunk-tokens 32 --answer-tokens 5"
    fused = record(
        "eval_fusion.__main__", *words.split(), "--results", str(tmp_path / "fusion.jsonl")
    )
    assert fused["about"]["cases"] == {"even": 2, "odd": 2}
    reuse, *others = fused["rows"]
    assert (reuse["recovered"]["mean"]["value"], reuse["computed"]) == (0, 0)
    assert all(row["computed"] > 0 for row in others)
    assert any(row["goals"] for row in others)
    monkeypatch.setattr("benches.eval_selective.__main__.PEER", tmp_path)
    words = ["--results", str(tmp_path / "selective.jsonl"), "--facts", "1", "--kind", "facts"]
    kept = record("eval_selective.__main__", *words)
    assert kept["goals"]
    assert {"int8", "default"} <= {row["buffers"] for row in kept["rows"]}


def test_every_bench_and_evaluation_of_the_makefile_is_run_or_has_a_record():
    text, this_file = (ROOT / "Makefile").read_text(), Path(__file__).read_text()
    kept = {path.stem for path in evaluation.RESULTS.glob("*.json")} | {"against", "instructions"}
    for kind, name in re.findall(r"^#: (bench|eval)-([a-z-]+):", text, re.MULTILINE):
        module = name.replace("-", "_") if kind == "bench" else f"eval_{name}"
        assert module in kept or re.search(rf'"{module}(\.__main__)?"', this_file), module


def test_runs_of_a_recording_are_simulated_with_each_term_and_without(tmp_path):
    """`make eval-times` without its servers."""
    package = "eval_times"
    workloads, predict, compare = (
        importlib.import_module(f"benches.{package}.{name}")
        for name in ("workloads", "predict", "compare")
    )
    recording, trace = tmp_path / "recording.jsonl", tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 6e5 + 1e3 * at, "input_length": 0, "output_length": 16 * (2 + at % 3)}
        | {"hash_ids": [0, *range(1 + 100 * (at % 4), 4 + 100 * (at % 4) + at // 4)]}
        for at in range(40)
    ]
    recording.write_text("".join(json.dumps(row) + "\n" for row in rows))
    chats = workloads.WORKLOADS["chats"]
    asks = chats.asks(recording, 24, 10.0)
    assert [ask.answer for ask in asks[:3]] == [2, 3, 4]
    assert (asks[0].at, round(asks[-1].at, 6), len({ask.who for ask in asks})) == (0.0, 10.0, 3)
    workloads.write_trace(trace, chats, asks)
    first, *_, last = [json.loads(line)["tokens"] for line in trace.read_text().splitlines()]
    assert (len(first), first[:16]) == (64, last[:16])
    config = {"num_hidden_layers": 2, "num_key_value_heads": 1, "num_attention_heads": 1}
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_size": 8}))
    (tmp_path / "p.toml").write_text(
        "[passes]\ncontexts = [0, 512]\ntokens = [1, 512]\nns = [[4e7, 5e8], [5e7, 6e8]]\n"
        "[decode]\ncontexts = [0, 512]\nrequests = [1, 8]\nns = [[4e7, 6e7], [5e7, 9e7]]\n"
        "[server]\nrequest_ns = 2e7\n"
        '[lanes."host read"]\nbytes_per_s = 1e4\n[lanes."host store"]\nbytes_per_s = 1e9\n'
    )
    tiers = [{"kind": "gpu", "blocks": 10, "policy": "lru", "write": "through"}]
    tiers.append({"kind": "host", "blocks": 99})
    runs = {
        term: predict.predicted(trace, tmp_path, tiers, tmp_path / "p.toml", change)
        for term, change in compare.TERMS.items()
    }
    figures = {term: predict.figures_of(run.requests) for term, run in runs.items()}
    assert runs["all"].found["gpu"] > 0 < runs["all"].found["host"]
    assert not any(compare.errors(figures["all"], figures["all"]).values())
    sooner = [term for term in figures if figures[term].mean < figures["all"].mean]
    # Answers of four tokens fill no block.
    never = {"all", "answers in the cache", "chunks of a prefill"}
    never |= {"loads within the step that reads them"}
    assert set(sooner) == set(figures) - never
    rows = [
        {"errors": {"median": off}, "load": load, "points": 1.0}
        for off, load in ((-0.2, 0.9), (0.1, 0.5))
    ]
    assert compare.summary(rows) == {
        "median": pytest.approx(0.15),
        "worst": 0.2,
        "high": 0.2,
        "points": 1.0,
    }


@pytest.mark.parametrize("path", sorted(evaluation.RESULTS.glob("*.json")), ids=lambda p: p.stem)
def test_a_kept_record_has_its_form_and_verdicts_that_follow_from_it(path):
    kept = json.loads(path.read_text())
    assert kept.get("date") or (kept.get("place") or kept.get("about") or kept["context"])["date"]
    rows = kept.get("rows", [])
    for row in rows if set(kept) == {"place", "rows"} else ():
        assert set(row) == COLUMNS
        if path.stem in {"core", "disk", "transfer"}:
            judged = row["ratio"] is not None and row["goal"] is not None
            assert row["ok"] == (row["ratio"] >= row["goal"] if judged else None), row["what"]


@pytest.mark.parametrize("name", tables.TABLES)
def test_a_page_has_the_table_of_a_record(name):
    assert pages.part(tables.page(name), name) == tables.rendered(name)


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_shows_the_figures_of_its_record(name):
    with Image.open(pictures.IMAGES / f"{name}.png") as drawn:
        assert json.loads(drawn.text[pictures.FIGURES]) == pictures.shown(name)
    if name == "first-token":
        assert pages.part(pictures.README, name) == pictures.caption(pictures.shown(name))


@dataclass
class Square:
    """A record of the evaluation below."""

    world: str
    number: int
    square: int

    @property
    def key(self):
        return (self.number,)


class Squares(evaluation.Evaluation[Square]):
    """Squares of 1 and 2, then of their sum; `measured` lists what was not in the file."""

    name, record_name, record, world = "squares", "squares.json", Square, "integers"
    measured, interrupt_at = [], None

    @staticmethod
    def options(parser):
        parser.set_defaults(least={"threads": 1})

    def measure(self, keys):
        for (number,) in keys:
            if number == self.interrupt_at:
                raise KeyboardInterrupt
            self.measured.append(number)
            yield Square(self.world, number, number**2)

    def stages(self):
        yield "both", [evaluation.Cell([(1,), (2,), (2,)], self.measure)]
        yield "sum", [evaluation.Cell([(self.by_key[1,].number + 2,)], self.measure)]

    def document(self, about):
        return {"ok": "cpu" in about, "rows": [record.square for record in self.by_key.values()]}

    def show(self, console):
        columns = {"number": lambda row: str(row.number), "square": lambda row: str(row.square)}
        console.print(evaluation.table_of("squares", columns, self.by_key.values()))


def test_an_evaluation_resumes_after_an_interrupt_and_a_cut_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(evaluation, "RESULTS", tmp_path)
    path = tmp_path / "new/squares.jsonl"

    def run(*words):
        Squares.measured = []
        status = evaluation.evaluate(Squares, ["--results", str(path), *words])
        return status, Squares.measured, *capsys.readouterr()

    with monkeypatch.context() as patch:
        patch.setattr(Squares, "interrupt_at", 2)
        assert run()[:2] == (evaluation.INTERRUPTED, [1])
    with path.open("a") as file:
        file.write('{"world": "reals", "number": 1, "square": 1}\n{"world": "integers", "numb')
    status, measured, out, _ = run("--json", "--record")
    assert (status, measured, json.loads(out)) == (0, [2, 3], {"ok": True, "rows": [1, 4, 9]})
    assert json.loads((tmp_path / "squares.json").read_text()) == json.loads(out)
    assert run("--json")[1:3] == ([], out)
    assert "squares" in run("--report")[2]
    path.write_text(path.read_text() + '{"number": 1, "cube": 1}\n')
    status, measured, _, error = run()
    assert (status, measured) == (2, [])
    assert "is not a record of squares" in error.replace("\n", " ")


def test_policies_are_resumed_and_a_figure_above_the_bound_is_an_error(record, tmp_path):
    out = tmp_path / "policies.json"
    words = ["--workers", "1", "--requests", "25", "--out", str(out)]
    words += ["--policy", "lru", "--policy", "learned"]
    first = record("policies.__main__", *words)
    assert {row["policy"] for row in first["rows"]} >= {"learned", "lru", "belady"}
    assert first["goals"]
    marked = [row | {"tokens": 1.5} for row in first["rows"][:-3]]
    out.write_text(json.dumps(first | {"rows": marked}))
    resumed = record("policies.__main__", *words, "--resume")
    assert resumed["rows"] == [*marked, *first["rows"][-3:]]
    assert json.loads(out.read_text()) == resumed
    above = Row("chats", 0, 10, "leaf-only", 1, "lru", 40.0, 50.0)
    assert policies.verify([above, Row(*("chats", 0, 10, "leaf-only", 1, "belady"), None, 49.0)])
    assert not policies.verify([above])


@pytest.mark.engine
def test_all_computed_is_the_full_prefill_and_plain_reuse_is_not():
    speaker, sizes = tiny(layers=4), Sizes(chunks=4, chunk=32, answer=5)
    case = case_of(speaker, "text", 1, sizes)
    with closing(Trial(speaker, sizes)) as trial:
        every, reuse = trial.measure(case, [Setting("all", 1.0), Setting("none", 0.0)])
    assert every.kl < 1e-8
    assert reuse.kl > 1e-3
    assert (every.same, reuse.computed) == (1, 0)


def test_policies_side_by_side_read_what_each_reads_alone():
    model = tiny(layers=2, heads=4).model
    ids = torch.randint(5, 200, (110,), generator=torch.Generator().manual_seed(0)).tolist()
    members = [("h2o-default", {"sinks": 4, "grace_period": 16}), ("keydiff-int8", {"sinks": 4})]
    with torch.no_grad(), Beside(model, members, 48, 16) as beside:
        beside.logits(ids[:96], keep=1)
        kept = beside.states()
        first = beside.logits(ids[96:])
        beside.back(kept)
        assert torch.equal(beside.logits(ids[96:]), first)
    for (name, given), mine in zip(members, first, strict=True):
        settings = CacheSettings(name, 48, 16, cache_kwargs=given)
        with torch.no_grad(), SelectiveCache(model, settings) as cache:
            cache.read(torch.tensor([ids[:96]]))
            alone = model(torch.tensor([ids[96:]]), past_key_values=cache).logits[0]
        assert (alone - mine).abs().max() < 1e-4


def test_every_row_of_the_core_has_one_name_a_driver_and_every_goal_a_row():
    names = [row.what for game in GAMES for row in game.rows]
    assert len(names) == len(set(names))
    assert set(GOALS) <= set(names)
    manifest = tomllib.loads((ROOT / "rust/bench/Cargo.toml").read_text())
    for bench, _, figures in rust.BENCHES.values():
        assert bench in {each["name"] for each in manifest["bench"]}
        assert set(figures) <= set(names)
        source = (ROOT / f"rust/bench/{bench}.rs").read_text()
        for identifier, *_ in figures.values():
            group = identifier.replace("1/64", "1:64").split("/")[0].replace("1:64", "1/64")
            assert f'"{group}"' in source, (bench, identifier)


@pytest.mark.parametrize(("peer", "ratio", "ok"), [(29.9, 2.99, False), (30.0, 3.0, True)])
def test_a_goal_is_a_ratio_to_the_peer_of_the_same_run(monkeypatch, peer, ratio, ok):
    monkeypatch.setattr(report, "GOALS", {"thing": {"Dynamo": 3.0}})
    game = Game("tiny", (Play(OURS, "benches.ours.thing"),), (), (CoreRow("thing", "it", "us"),))
    values = ((OURS, 12.0), ("Dynamo", peer), (OURS, 10.0), ("Dynamo", 99.0))
    lines = [referee.Line(who, "thing", value, "us", {}) for who, value in values]
    [row] = report.rows_of([game], lines)
    assert (row.ours, row.more["ours_median"], row.ratio, row.ok) == (10.0, 11.0, ratio, ok)
    assert report.rows_of([game], lines[:1])[0].ok is None


@pytest.mark.parametrize(("share", "right"), [(0.8131, True), (0.8129, False), (0.8171, False)])
def test_a_trace_that_is_played_wrongly_is_not_reported(share, right):
    about = {"blocks": 100_000, "seed": 1234, "hit_rate": share}
    lines = [referee.Line("vLLM", "request", 480.0, "us", about)]
    if right:
        assert report.check(lines) == ["vLLM finds 81.31 % of the prompt blocks (request)"]
        return
    with pytest.raises(report.PlayedWronglyError, match="nothing is reported"):
        report.check(lines)


def test_rows_are_judged_by_ratios():
    assert bounded("step", 1.4, 1.0, "s", "peer", 1.5).ok
    assert not bounded("step", 1.6, 1.0, "s", "peer", 1.5).ok
    rounds = [(8.0, 10.0), (9.0, 10.0), (10.0, 10.0), (11.0, 10.0), (20.0, 10.0)]
    (row,) = against.compared({("request", "us"): rounds})
    assert (row.low, row.ratio, row.high, row.ok) == (0.9, 1.0, 1.1, True)
    (row,) = against.compared({("request", "us"): [(1.12, 1.0)] * 2})
    assert not row.ok


def test_the_common_trace_is_the_published_one_and_needs_numpy_alone():
    trace = Trace()
    blocks = [(SYSTEM_TOKENS + prompt) // BLOCK for _, prompt, _ in trace.order]
    assert (len(trace), sum(blocks)) == (50_031, 4_788_715)
    code = (
        "import sys; import benches.workload, benches.measure; "
        "assert not {'kvtrie', 'torch', 'rich'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_an_answer_that_parts_at_a_clear_token_is_different():
    right, margins = np.array([[1, 2, 3]] * 4), np.array([[1.9, 1.9, TIE / 2]] * 4)
    got = np.array([[1, 2, 3], [1, 5, 3], [1, 2, 4], [6, -1, -1]])
    assert compare(right, margins, got) == (2, 1)
    assert compare(right, margins, right) == (0, 0)


def test_a_gpu_check_names_what_did_not_run_and_resumes(tmp_path, monkeypatch):
    words = [word for row in check.ROWS for word in row.command if word.startswith("tests/")]
    assert all((ROOT / word).exists() for word in words)
    good = check.Row("good", ("-m", "this"), 60)

    def rows(status):
        assert check.main(["--out", str(tmp_path)]) == status
        return json.loads((tmp_path / "gpu-check.json").read_text())["rows"]

    monkeypatch.setattr(check, "device", lambda: None)
    assert {row["reason"] for row in rows(2)} == {"no CUDA device"}
    monkeypatch.setattr(check, "device", lambda: "a card")
    monkeypatch.setattr(check, "ROWS", (check.Row("bad", ("-m", "no_such_module"), 60), good))
    assert [row["state"] for row in rows(1)] == ["failed", "passed"]
    monkeypatch.setattr(
        check, "carry_out", lambda row, _: check.Result(row.name, "passed", "again")
    )
    assert [row["reason"] for row in rows(0)] == ["again", ""]


@LINUX
def test_a_quick_soak_is_well(record):
    document = record("soak.__main__")
    assert document["ok"]
    assert len(document["minutes"]) == 5  # one for sixty requests


@LINUX
def test_a_wrong_byte_ends_a_soak_with_exit_status_1(monkeypatch, capsys):
    copy, loads = Pool.copy_from, []

    def careless(self, source, source_units, units):
        copy(self, source, source_units, units)
        if self.blocks == 32 != source.blocks:
            loads.append(len(units))
            if len(loads) >= 20:  # a request that is given up does not look
                self.planes[0][int(units[-1]), 0] ^= 1

    monkeypatch.setattr(Pool, "copy_from", careless)
    assert soak.main(["--requests", "400", "--blocks", "32", "48", "64"]) == 1
    out = capsys.readouterr().out
    assert "other bytes in block" in out
    assert "it failed" in out
