"""The table of ratios: what is played, what is read, what is reported, what is refused."""

import json
from dataclasses import replace

import pytest
from rich.console import Console

from benches.core import __main__ as door
from benches.core import referee, report
from benches.core.goals import GOALS
from benches.core.referee import DriverError, Line, missing, parse, run, schedule
from benches.core.report import PlayedWronglyError, check, figure, rows_of, table
from benches.core.rows import GAMES, LIMIT, OURS, Game, Play, Row, chosen

TINY = Game(
    "tiny",
    (Play(OURS, "benches.ours.thing"), Play(LIMIT, "benches.limit")),
    (Play("dynamo", "benches.peers.thing"), Play("vllm", "benches.peers.other")),
    (
        Row("thing", "a thing", "us", peer="theirs"),
        Row("alone", "alone", "B"),
        Row("more", "more than alone", "B", less="alone"),
    ),
)


def line(peer, what, value, **context):
    return Line(peer, what, value, "us", context)


def played(*values):
    return [line(*each) for each in values]


def lru(share, peer="vLLM", **context):
    told = {"blocks": 100_000, "seed": 1234, "hit_rate": share, **context}
    return line(peer, "request", 480.0, **told)


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Dynamo is installed, vLLM is not, and there is no prototype."""
    (tmp_path / "dynamo").mkdir()
    (tmp_path / "dynamo/.ready").touch()
    monkeypatch.setattr(referee, "ENVIRONMENTS", tmp_path)
    monkeypatch.delenv(referee.PROTOTYPE, raising=False)


def test_lines_are_read_among_greetings():
    measured = {"peer": "vLLM", "what": "decode", "value": 4.25, "unit": "us", "steps": 500}
    printed = ["INFO hello", "{not json", '{"value": 3}', json.dumps(measured), ""]
    assert parse(printed) == [Line("vLLM", "decode", 4.25, "us", {"steps": 500})]


@pytest.fixture
def goals(monkeypatch):
    """A peer's figure must be three times ours."""
    monkeypatch.setattr(report, "GOALS", {"thing": {"Dynamo": 3.0}})


@pytest.mark.usefixtures("goals")
def test_best_median_ratio_and_goal():
    lines = played(
        ("Dynamo", "theirs", 30.0),
        (OURS, "thing", 5.0),
        (OURS, "alone", 80.0),
        (OURS, "more", 90.0),
        ("Dynamo", "theirs", 10.0),
        ("vLLM", "theirs", 400.0),
        (OURS, "thing", 3.0),
    )
    thing, other, alone, more = rows_of([TINY], lines)
    assert (thing.ours, thing.more["ours_median"], thing.more["rounds"]) == (3.0, 4.0, 2)
    assert (thing.peer_name, thing.peer, thing.more["peer_median"]) == ("Dynamo", 10.0, 20.0)
    assert (thing.ratio, thing.goal, thing.ok) == (3.333, 3.0, True)
    assert (other.peer_name, other.peer, other.ratio) == ("vLLM", 400.0, 133.333)
    assert (other.goal, other.ok) == (None, None)
    assert (alone.peer_name, alone.peer, alone.ratio, alone.ok) == ("-", None, None, None)
    assert (more.ours, more.ok) == (10.0, None)
    assert thing.more["limit"] is None


@pytest.mark.usefixtures("goals")
@pytest.mark.parametrize(("peer", "ok"), [(29.9, False), (30.0, True)])
def test_a_goal_is_a_ratio_to_the_peer_of_the_same_run(peer, ok):
    [row, *_] = rows_of([TINY], played((OURS, "thing", 10.0), ("Dynamo", "theirs", peer)))
    assert row.ok is ok


@pytest.mark.usefixtures("goals")
def test_without_ours_or_the_peer_nothing_is_judged():
    [row, *_] = rows_of([TINY], played(("Dynamo", "theirs", 10.0)))
    assert (row.ours, row.ratio, row.ok, row.more["rounds"]) == (None, None, None, 0)
    [row, *_] = rows_of([TINY], played((OURS, "thing", 10.0)))
    assert (row.ours, row.ratio, row.ok) == (10.0, None, None)


def test_every_goal_is_of_a_row_that_the_peer_plays():
    names = {row.what for game in GAMES for row in game.rows}
    assert set(GOALS) <= names


def test_the_prototype_is_a_limit_and_no_peer():
    rows = rows_of([TINY], played((OURS, "thing", 5.0), (LIMIT, "thing", 2.5)))
    assert [row.peer_name for row in rows] == ["-"] * 3
    assert (rows[0].more["limit"], rows[1].more["limit"]) == (2.5, None)


@pytest.mark.parametrize("share", [0.8131, 0.815, 0.8169])
def test_lru_shares_that_are_right(share):
    assert check([lru(share)]) == [f"vLLM finds {100 * share:.2f} % of the prompt blocks (request)"]


@pytest.mark.parametrize("share", [0.74, 0.8129, 0.8171])
def test_another_trace_is_not_reported(share):
    with pytest.raises(PlayedWronglyError, match=f"{100 * share:.2f} %.*81.5 % ± 0.2.*100000"):
        check([lru(0.815), lru(share)])


def test_only_lru_on_the_common_trace_is_judged():
    others = [
        lru(0.74, OURS, policy="retention"),
        lru(0.807, "vLLM ARC", policy="arc"),
        lru(0.9, blocks=1_000_000),
        lru(0.7, seed=5),
        line(OURS, "decode", 0.2),
    ]
    assert check(others) == []


@pytest.mark.usefixtures("installed")
def test_rounds_alternate():
    plays = schedule([TINY], 2, peers=True)
    assert [play.environment for play in plays] == ["dynamo", OURS, "dynamo", OURS]
    assert [play.environment for play in schedule([TINY], 2, peers=False)] == [OURS, OURS]
    assert len(schedule([replace(TINY, once=True)], 2, peers=True)) == 2


@pytest.mark.usefixtures("installed")
def test_the_prototype_is_played_where_it_is_named(monkeypatch):
    monkeypatch.setenv(referee.PROTOTYPE, "folder")
    plays = schedule([TINY], 1, peers=False)
    assert [play.environment for play in plays] == [OURS, LIMIT]


@pytest.mark.usefixtures("installed")
def test_a_peer_that_is_not_there_is_said_with_what_installs_it():
    [words] = missing([TINY, TINY])
    assert words.startswith("vllm: skipped, not installed; `make peers ARGS=vllm`")
    assert "Linux x86-64, Python 3.11" in words


def test_a_driver_that_fails_says_why():
    with pytest.raises(DriverError, match=r"benches\.ours\.leaves --policy no ended with 1:"):
        run(Play(OURS, "benches.ours.leaves", ("--policy", "no")))


def test_rows_are_chosen_by_prefix():
    [game] = chosen(["lookup"])
    assert (game.name, [row.what for row in game.rows]) == (
        "request",
        ["lookup.mean", "lookup.p99"],
    )
    assert chosen([]) == list(GAMES)
    assert chosen(["nonsense"]) == []


def test_every_row_has_one_name():
    names = [row.what for game in GAMES for row in game.rows]
    assert len(names) == len(set(names))
    assert all(row.less is None or row.less in names for game in GAMES for row in game.rows)


@pytest.mark.usefixtures("goals")
def test_the_table_names_each_row_once():
    lines = played((OURS, "thing", 5.0), ("Dynamo", "theirs", 10.0), ("vLLM", "theirs", 20.0))
    console = Console(width=140, record=True, quiet=True)
    console.print(table(rows_of([TINY], lines)))
    console = Console(width=140)
    with console.capture() as got:
        console.print(table(rows_of([TINY], lines)))
    text = got.get()
    assert text.count("a thing") == 1
    assert "missed" in text
    assert "10 (10) us" in text
    assert "limit" not in text
    assert figure(None, None, "us") == "-"


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """The door, with one game of ours alone that prints without being played."""
    game = Game("alone", (Play(OURS, "benches.ours.thing"),), (), (Row("thing", "it", "us"),))
    monkeypatch.delenv(referee.PROTOTYPE, raising=False)
    monkeypatch.setattr(door, "OUT", tmp_path / "core.json")
    monkeypatch.setattr(door, "GAMES", (game,))
    monkeypatch.setattr(door, "chosen", lambda _: [game])
    monkeypatch.setattr(door, "run", lambda _: [line(OURS, "thing", 0.5, steps=9)])
    return tmp_path / "core.json"


def test_the_document_is_kept_and_a_game_is_replaced(kept, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["core", "--json"])
    assert door.main() == 0
    printed = json.loads(capsys.readouterr().out)
    assert set(printed) == {"place", "rows"}
    [row] = printed["rows"]
    columns = {"what", "ours", "peer", "peer_name", "unit", "ratio", "goal", "ok", "more"}
    assert set(row) == columns
    assert (row["ours"], row["more"]["limit"], row["more"]["rounds"]) == (0.5, None, 2)
    told = printed["place"]["games"]["alone"]
    assert {"date", "cpu", "cores", "load", "load_after"} <= told.keys()
    assert told["lines"] == 2 * [
        {"peer": OURS, "what": "thing", "value": 0.5, "unit": "us", "steps": 9}
    ]
    assert json.loads(kept.read_text()) == printed
    monkeypatch.setattr(door, "run", lambda _: [line(OURS, "thing", 2.0)])
    monkeypatch.setattr("sys.argv", ["core"])
    assert door.main() == 0
    assert "0 of 0 goals reached" in capsys.readouterr().out
    [row] = json.loads(kept.read_text())["rows"]
    assert row["ours"] == 2.0


def test_parts_are_not_put_on_record(kept, monkeypatch):
    monkeypatch.setattr("sys.argv", ["core", "--without-peers"])
    assert door.main() == 0
    assert not kept.exists()
    out = kept.with_name("other.json")
    monkeypatch.setattr("sys.argv", ["core", "--without-peers", "--out", str(out)])
    assert door.main() == 0
    assert json.loads(out.read_text())["rows"]


def test_a_wrong_trace_leaves_no_report(kept, monkeypatch, capsys):
    monkeypatch.setattr(door, "run", lambda _: [lru(0.5)])
    monkeypatch.setattr("sys.argv", ["core"])
    assert door.main() == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert "nothing is reported" in told.err.replace("\n", " ")
    assert not kept.exists()


@pytest.mark.parametrize("words", [["--only", "nonsense"], ["--rounds", "0"]])
def test_bad_options_are_refused(words, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["core", *words])
    with pytest.raises(SystemExit):
        door.main()
    assert words[1] in capsys.readouterr().err
