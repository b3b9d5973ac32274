"""The evaluation of fusion: cases and figures are right, and interrupts lose nothing."""

from __future__ import annotations

import json
import zlib
from contextlib import closing
from dataclasses import replace

import pytest

from benches.eval_fusion import __main__ as door
from benches.eval_fusion.cases import KINDS, Sizes, case_of
from benches.eval_fusion.record import Record, append, read
from benches.eval_fusion.settings import Row, Setting, rows_of
from benches.eval_fusion.summary import choose, correlation, line_of
from benches.eval_fusion.trial import Trial
from kvtrie.demo.model import tiny

SMALL = Sizes(chunks=4, chunk=32, answer=5)
QUICK = ["--quick", "--even", "1", "--odd", "1", "--kinds", "split", "text", "--json"]
QUICK += ["--chunks", "4", "--chunk-tokens", "32", "--answer-tokens", "5"]
REUSE = Setting("none", 0.0)


def record(kind, seed, setting, kl, **more):
    given = {"same": 1.0, "seconds": 1.0, "full": 4.0, "computed": 0.1, "score": None} | more
    return Record("world", kind, seed, str(setting), kl, **given)


def of(*records):
    return {each.key: each for each in records}


@pytest.mark.engine
@pytest.mark.slow
def test_a_small_evaluation_goes_on_behind_an_interrupt(tmp_path, monkeypatch, capsys):
    path = tmp_path / "figures.jsonl"
    arguments = [*QUICK, "--results", str(path)]

    def interrupted(path, record):
        append(path, record)
        if len(path.read_text().splitlines()) == 5:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(door, "append", interrupted)
        assert door.main(arguments) == door.INTERRUPTED
    assert "the same command goes on" in capsys.readouterr().err
    kept = path.read_text()
    path.write_text(kept + kept.splitlines()[0][:40])  # cut off within a line
    assert door.main(arguments) == 0
    document = json.loads(capsys.readouterr().out)
    assert path.read_text().startswith(kept)
    assert document["about"]["cases"] == {"even": 2, "odd": 2}
    assert [row["row"] for row in document["rows"]] == [row.name for row in rows_of(8)]
    assert all(set(row["recovered"]) == {"mean", "split", "text"} for row in document["rows"])
    reuse, *others = document["rows"]
    assert reuse["recovered"]["mean"]["value"] == 0
    assert reuse["computed"] == 0
    assert all(row["computed"] > 0 and row["cost"] > 0 for row in others)
    assert path.with_suffix(".png").stat().st_size > 0
    lines = len(path.read_text().splitlines())
    monkeypatch.setattr(Trial, "measure", lambda *_: pytest.fail("all is measured"))
    assert door.main(arguments) == 0
    assert len(path.read_text().splitlines()) == lines
    assert json.loads(capsys.readouterr().out)["rows"] == document["rows"]


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
    def words(text):  # so many that no word of any Python's prose has the number of a code
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
        record("text", 5, setting, 7.0, score=0.1),  # without plain reuse beside it
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


def test_records_of_another_world_or_half_a_line_are_left_aside(tmp_path):
    path = tmp_path / "folder" / "figures.jsonl"
    mine = record("text", 1, REUSE, 0.5)
    assert read(path, "world") == {}
    append(path, mine)
    with path.open("a") as file:
        file.write('{"world": "wor')
    append(path, record("text", 2, REUSE, 0.25))
    assert [each.kl for each in read(path, "world").values()] == [0.5, 0.25]
    assert read(path, "another") == {}


@pytest.mark.parametrize(
    "words", ["--odd 0", "--even -1", "--chunks 3", "--chunk-tokens 16", "--answer-tokens 0"]
)
def test_sizes_that_cannot_be_are_refused(words, capsys):
    with pytest.raises(SystemExit):
        door.main(["--quick", *words.split()])
    assert "wanted" in capsys.readouterr().err
