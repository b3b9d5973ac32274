"""The demo: its exit status is its verdict, and what it prints and draws is there."""

import contextlib
import io
import itertools
import json
import random

import pytest
import torch

from kvtrie.demo import run
from kvtrie.demo.gain import Gain, gain_table, gains
from kvtrie.demo.run import Options, demo
from kvtrie.demo.turn import Turn
from kvtrie.demo.turn_table import columns
from kvtrie.errors import TransferError
from kvtrie.tiers import DiskStorage

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


DEEP = pytest.mark.deep


@pytest.fixture(scope="module", params=["holes", pytest.param("leaf-only", marks=DEEP)])
def finished(request, tmp_path_factory):
    """Two runs with the tiny model: options, exit statuses, the documents they printed."""
    folder = tmp_path_factory.mktemp("demo")
    options = Options(
        structure=request.param,
        tiny=True,
        json=True,
        answer_tokens=4,
        picture=folder / "picture.png",
        save=folder / "report.json",
        disk=folder / "disk",
    )
    threads = torch.get_num_threads()
    runs = []
    for _ in range(2):
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
            status = demo(options)
        runs.append((status, json.loads(out.getvalue())))
    torch.set_num_threads(threads)
    return options, runs


@pytest.mark.gpu
@pytest.mark.parametrize("structure", ["holes", "leaf-only"])
def test_a_model_on_a_card_answers_as_without_kvtrie(structure, capsys):
    assert demo(Options(structure=structure, tiny=True, json=True, picture=None, disk=None)) == 0
    document = json.loads(capsys.readouterr().out)
    assert sum(turn["reused"][1] for turn in document["turns"]) > 0


@pytest.mark.slow
def test_every_answer_is_as_without_kvtrie(finished):
    options, runs = finished
    for status, document in runs:
        assert status == 0
        assert document["ok"]
        assert len(document["turns"]) == 36
        assert {turn["verdict"] for turn in document["turns"]} <= {"equal", "tie"}
        assert max(turn["difference"] for turn in document["turns"]) < 1e-4
        for turn in document["turns"]:
            assert round(sum(turn["reused"])) + turn["end"] <= turn["prompt"]
            assert turn["sooner"] >= 0
        holes = sum(turn["holes"] for turn in document["turns"])
        assert (holes > 0) == (options.structure == "holes")
        for tier in range(3):
            assert sum(turn["reused"][tier] for turn in document["turns"]) > 0


@pytest.mark.slow
@pytest.mark.parametrize("structure", [pytest.param("holes", marks=DEEP), "leaf-only"])
def test_without_a_disk_tier_dropped_tokens_are_recomputed(structure, capsys):
    status = demo(
        Options(structure=structure, tiny=True, json=True, answer_tokens=4, picture=None, disk=None)
    )
    document = json.loads(capsys.readouterr().out)
    assert status == 0
    assert {turn["verdict"] for turn in document["turns"]} <= {"equal", "tie"}
    holes = sum(turn["holes"] for turn in document["turns"])
    assert (holes > 0) == (structure == "holes")


@pytest.mark.slow
@pytest.mark.parametrize("first", [pytest.param(1, marks=DEEP), random.Random(0).randrange(2, 40)])
def test_every_answer_is_as_without_kvtrie_on_a_disk_that_fails(
    first, tmp_path, capsys, monkeypatch, caplog
):
    write, write_many, seen = DiskStorage.write, DiskStorage.write_many, itertools.count(1)

    def one(self, *given):
        if next(seen) >= first:
            raise TransferError("no space left on the device")
        write(self, *given)

    def many(self, blocks):
        good = [block for block in blocks if next(seen) < first]
        return write_many(self, good) + ["no space left"] * (len(blocks) - len(good))

    monkeypatch.setattr(DiskStorage, "write", one)
    monkeypatch.setattr(DiskStorage, "write_many", many)
    options = Options(tiny=True, json=True, answer_tokens=4, picture=None, disk=tmp_path / "disk")
    status = demo(options)
    printed = capsys.readouterr()
    assert printed.out, printed.err
    document = json.loads(printed.out)
    assert status == 0
    assert {turn["verdict"] for turn in document["turns"]} <= {"equal", "tie"}
    assert next(seen) > first + 1
    lines = [row.getMessage() for row in caplog.records if "not stored" in row.getMessage()]
    assert len(lines) == len(set(lines)) <= 2  # one per call of the storage
    assert lines


@pytest.mark.slow
def test_a_second_run_finds_what_the_first_left_on_disk(finished):
    _, ((_, first), (_, second)) = finished
    assert first["restored"] == 0
    assert second["restored"] > 0
    earlier = [[turn["earlier"] for turn in document["turns"]] for document in (first, second)]
    assert sum(earlier[0]) == 0
    assert sum(earlier[1]) > 0
    assert second["turns"][0]["reused"][2] > 0, "the system prompt comes from disk"
    assert "left on disk by an earlier run" in second["verdict"]


@pytest.mark.slow
def test_the_picture_is_drawn_and_the_timeline_fills(finished):
    options, ((_, document), _) = finished
    assert options.picture.read_bytes().startswith(b"\x89PNG")
    assert options.save.exists()
    totals = [sum(after) for after in document["shares"]]
    assert totals == sorted(totals)
    gpu, host, disk, dropped = document["shares"][-1]
    assert gpu > 0
    assert host > 0
    assert disk > 0
    assert dropped > 0


def turn(**changes):
    same = {
        "chat": 1,
        "turn": 1,
        "prompt": 10,
        "reused": (5.0, 0.0),
        "holes": 2,
        "sooner": 0,
        "earlier": 0.0,
        "end": 3,
        "first_s": 1.0,
        "uncached_s": 2.0,
        "difference": 1e-6,
        "verdict": "equal",
        "answer": [1],
    }
    return Turn(**(same | changes))


@pytest.mark.parametrize("tiny", [True, False])
def test_the_table_explains_each_column_and_times_of_the_tiny_model_are_left_out(tiny):
    names = [name for name, _ in columns(timed=not tiny)]
    assert {"prompt", "reused from", "holes", "sooner", "end", "answer"} <= set(names)
    assert ("first token" in names) is not tiny
    assert ("first tokens took" in run._verdict([turn()], "holes", timed=not tiny)[1]) is not tiny


def test_gains_count_returning_turns_by_their_slowest_tier():
    turns = [
        turn(reused=(0.0, 0.0)),
        turn(turn=2, reused=(5.0, 0.0), first_s=1.0, uncached_s=4.0),
        turn(turn=2, reused=(2.0, 6.0), first_s=2.0, uncached_s=4.0),
        turn(turn=3, reused=(0.0, 0.0), first_s=4.0, uncached_s=4.0),
    ]
    found = gains(turns, ["gpu", "host"])
    assert found == [
        Gain("gpu", 1, 1.0, 4.0, 0.5),
        Gain("host", 1, 2.0, 4.0, 0.8),
        Gain("nothing", 1, 4.0, 4.0, 0.0),
        Gain("all", 3, 2.0, 4.0, 13 / 30),
    ]
    assert len(gain_table(found, timed=True).columns) == 6
    assert len(gain_table(found, timed=False).columns) == 3
    assert gains([turn()], ["gpu", "host"]) == []


def test_a_wrong_answer_fails():
    assert run._verdict([turn()], "holes")[0]
    assert run._verdict([turn(verdict="tie")], "holes")[0]
    assert "tie" in run._verdict([turn(verdict="tie")], "holes")[1]
    ok, sentence = run._verdict([turn(), turn(chat=7, turn=2, verdict="differs")], "holes")
    assert not ok
    assert "chat 7, turn 2" in sentence


def test_no_token_recomputed_in_holes_fails_where_holes_are_to_be_shown():
    ok, sentence = run._verdict([turn(holes=0, sooner=16)] * 2, "holes")
    assert not ok
    assert "All 2 answers equal" in sentence
    assert "--gpu-share" in sentence
    assert run._verdict([turn(holes=0), turn(holes=1)], "holes")[0]
    assert run._verdict([turn(holes=0)], "leaf-only")[0]


def test_ctrl_c_ends_cleanly(monkeypatch, capsys):
    def interrupt(*_args, **_kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "take", interrupt)
    assert demo(Options(tiny=True, picture=None, disk=None)) == 130
    assert "Stopped." in capsys.readouterr().out
