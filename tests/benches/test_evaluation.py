"""Evaluations: a run resumes from its records, and figures are what they are said to be."""

from __future__ import annotations

import json
import zlib
from contextlib import closing
from dataclasses import dataclass, replace

import pytest
import torch

from benches import evaluation
from benches.eval_fusion.cases import KINDS, Sizes, case_of
from benches.eval_fusion.settings import Record, Row, Setting
from benches.eval_fusion.summary import choose, correlation, line_of
from benches.eval_fusion.trial import Trial
from benches.eval_selective.beside import Beside
from benches.eval_train.__main__ import Record as Arm
from benches.eval_train.__main__ import rows_of
from kvtrie.demo.model import tiny
from kvtrie.selective import CacheSettings, SelectiveCache

SMALL = Sizes(chunks=4, chunk=32, answer=5)
REUSE = Setting("none", 0.0)


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

    def draw(self, path):
        bars = {"one": evaluation.Interval(1, 0, 2), "four": evaluation.Interval(4, -9, 5)}
        panels = {"left": bars, "right": {"four": bars["four"]}}
        evaluation.draw_intervals(
            path, "Squares", panels, label="integers", goals={("right", "four"): 4.5}, least=-1
        )


@pytest.fixture
def squares(tmp_path, monkeypatch, capsys):
    """Run the evaluation: exit status, what was measured, standard output and error."""
    monkeypatch.setattr(evaluation, "RESULTS", tmp_path)
    threads = torch.get_num_threads()

    def run(*words):
        Squares.measured = []
        words = ["--results", str(tmp_path / "new/squares.jsonl"), *words]
        status = evaluation.evaluate(Squares, "Squares.", words)
        return status, Squares.measured, *capsys.readouterr()

    yield run
    torch.set_num_threads(threads)


def test_a_run_resumes_after_an_interrupt_and_a_cut_line(squares, tmp_path, monkeypatch):
    path = tmp_path / "new/squares.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr(Squares, "interrupt_at", 2)
        status, measured, _, error = squares()
    assert (status, measured) == (evaluation.INTERRUPTED, [1])
    assert "1 records are in" in error
    with path.open("a") as file:
        file.write('{"world": "integers", "number": 2, "squ')
    status, measured, out, _ = squares("--json", "--record")
    assert (status, measured, json.loads(out)) == (0, [2, 3], {"ok": True, "rows": [1, 4, 9]})
    assert json.loads((tmp_path / "squares.json").read_text()) == json.loads(out)
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert squares("--json")[1:3] == ([], out)
    assert "squares" in squares("--report")[2]


def test_records_of_another_world_are_left_alone_and_of_another_form_refused(squares, tmp_path):
    path = tmp_path / "new/squares.jsonl"
    path.parent.mkdir()
    path.write_text('{"world": "reals", "number": 1, "square": 1}\n')
    status, _, _, error = squares("--report")
    assert (status, "no record of integers" in error.replace("\n", " ")) == (2, True)
    assert squares()[1] == [1, 2, 3]
    path.write_text(path.read_text() + '{"number": 1, "cube": 1}\n')
    status, measured, _, error = squares()
    assert (status, measured) == (2, [])
    assert "line 5, is not a record of squares" in error.replace("\n", " ")
    with pytest.raises(SystemExit):
        squares("--threads", "0")


def record(kind, seed, setting, kl, **more):
    given = {"same": 1.0, "seconds": 1.0, "full": 4.0, "computed": 0.1, "score": None} | more
    return Record("world", kind, seed, str(setting), kl, **given)


def of(*records):
    return {each.key: each for each in records}


@pytest.mark.engine
def test_all_computed_is_the_full_prefill_and_plain_reuse_is_not():
    speaker = tiny(layers=4)
    case = case_of(speaker, "text", 1, SMALL)
    with closing(Trial(speaker, SMALL)) as trial:
        every, reuse, again = trial.measure(case, [Setting("all", 1.0), REUSE, REUSE])
    assert every.kl < 1e-8
    assert reuse.kl > 1e-3
    assert every.same == 1
    assert every.computed == pytest.approx(3 / 4)  # the first chunk is exact
    assert (reuse.kl, reuse.computed) == (again.kl, 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_cases_have_their_facts_where_they_say(kind, seed):
    def words(text):  # a word of prose never has the number of a code
        return [zlib.crc32(word.encode()) for word in text.split()]

    speaker = replace(tiny(layers=1), tokens=words)
    case = case_of(speaker, kind, seed, SMALL)
    assert case == case_of(speaker, kind, seed, SMALL)
    assert case.chunks != case_of(speaker, kind, seed + 1, SMALL).chunks
    assert [len(chunk) for chunk in case.chunks] == [SMALL.chunk] * SMALL.chunks
    if kind == "text":
        assert len(case.answer) == SMALL.answer
        return
    *_, town, is_ = case.query
    [code] = case.answer
    fact = speaker.tokens("The access code is") if kind == "header" else [is_]
    row = [token for chunk in case.chunks for token in chunk]
    words = [town, *fact, *speaker.tokens("9.")][:-1]
    found = [at for at in range(len(row)) if row[at : at + len(words)] == words]
    assert len(found) == 1
    border = (found[0] + 1) % SMALL.chunk == 0
    assert border == (kind != "local")
    assert code not in row  # there it ends in a full stop


def test_settings_are_chosen_on_even_seeds_and_reported_on_odd_ones():
    one, two = Setting("values", 0.15, at=1), Setting("values", 0.15, at=2)
    row = Row("values", [one, two], {"mean": 0.5, "split": 0.1})
    records = of(
        *(record(kind, seed, REUSE, 1.0) for kind in ("split", "text") for seed in range(4)),
        *(record(kind, seed, one, 0.9 - seed / 10) for kind in ("split",) for seed in range(4)),
        *(record(kind, 1, two, 0.2, same=0.5) for kind in ("split", "text")),
        *(record("text", seed, two, 0.4) for seed in (0, 3)),
    )
    assert choose(row, records, REUSE) == two
    assert choose(row, of(record("text", 0, one, 0.0)), REUSE) == one  # nothing to compare with
    line = line_of(row, two, records, REUSE)
    assert line.cases == 3
    assert line.recovered["split"] == pytest.approx((0.8, 0.8, 0.8))
    assert line.recovered["text"] == pytest.approx((0.7, 0.6, 0.8))
    assert line.recovered["mean"] == pytest.approx((0.75, 0.7, 0.8))
    assert line.kl == pytest.approx((0.2 + 0.3) / 2)
    assert (line.exact, line.same, line.cost) == pytest.approx((1 / 3, 2 / 3, 1 / 4))
    assert line.rank is None
    assert line.missed() == {"mean": False, "split": False}
    strict = line._replace(row=Row("values", [two], {"mean": 0.71, "header": 0.1}))
    assert strict.missed() == {"mean": True, "header": True}
    assert line_of(row, two, of(record("text", 0, two, 0.1)), REUSE) is None


def test_recovered_weighs_cases_by_what_plain_reuse_loses():
    setting = Setting("first", 0.15)
    records = of(
        record("text", 1, REUSE, 1.0),
        record("text", 3, REUSE, 0.001),
        record("text", 1, setting, 0.1, score=0.9),
        record("text", 3, setting, 0.01, score=0.95),
        record("text", 5, setting, 7.0, score=0.1),  # has no plain reuse to compare with
    )
    line = line_of(Row("first", [setting], {}), setting, records, REUSE)
    assert line.cases == 2
    assert line.recovered["text"].value == pytest.approx(1 - 0.11 / 1.001)


def test_the_rank_correlation_is_spearmans():
    assert correlation([1, 2, 3, 10], [1, 4, 9, 16]) == pytest.approx(1)
    assert correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    # d = 1, 1, 0, 1, 1: 1 - 6 * 4 / (5 * 24)
    assert correlation([1, 2, 3, 4, 5], [2, 1, 3, 5, 4]) == pytest.approx(0.8)
    assert correlation([1, 1, 2], [0, 1, 5]) == pytest.approx(0.866, abs=1e-3)
    assert correlation([1, 2], [1, 2]) is None
    assert correlation([1, 1, 1], [1, 2, 3]) is None


def test_policies_side_by_side_read_what_each_reads_alone():
    model = tiny(layers=2, heads=4).model
    ids = torch.randint(5, 200, (110,), generator=torch.Generator().manual_seed(0)).tolist()
    members = [
        ("h2o-default", {"sinks": 4, "grace_period": 16}),
        ("keydiff-int8", {"sinks": 4}),
        ("lastrec-torch-quantized8", {"sinks": 4}),
        ("mix-snapkv+keydiff-default", {"grace_period": 8}),
        ("h2o-orig-default", {}),
    ]
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


def test_training_is_worth_the_difference_of_paired_cases():
    def arm(*hits):
        return Arm("any", list(hits))

    arms = {
        "untrained, policy": arm(0, 0, 0, 0),
        "untrained, dense": arm(0, 0, 0, 1),
        "trained, policy": arm(1, 1, 0, 1),
        "trained, dense": arm(1, 0, 0, 1),
    }
    *rows, worth = rows_of([arms])
    assert [row.ours for row in rows] == [0, 25, 75, 50]
    assert (worth.ours, worth.more, worth.ok) == (25, {"half": 49.0, "n": 4}, True)
    assert rows_of([]) == []
