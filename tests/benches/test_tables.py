"""Tables of benches: what is played, read and refused, and how goals are judged."""

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benches import against
from benches.core import __main__ as door
from benches.core import referee, report
from benches.core.goals import GOALS
from benches.core.referee import DriverError, Line, missing, parse, run, schedule
from benches.core.report import PlayedWronglyError, check, rows_of
from benches.core.rows import GAMES, LIMIT, OURS, Game, Play, Row, chosen
from benches.gpu import __main__ as gpu
from benches.gpu.clock import Row as GpuRow
from benches.measure import Clock, percentile
from benches.ours import rust
from benches.policies.cells import Row as Cell
from benches.policies.goals import Figures, goals_of
from benches.policies.traces import COMMON
from benches.record import Result, bounded, document, read, write
from benches.reproductions import mooncake
from benches.sim import __main__ as simulator
from kvtrie.sim.trace import write_trace
from kvtrie.sim.workloads import conversations

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benches/results"
COLUMNS = {"what", "ours", "peer", "peer_name", "unit", "ratio", "goal", "ok", "more"}
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
@pytest.mark.parametrize(
    ("values", "ratio", "ok"),
    [
        ([(OURS, "thing", 10.0), ("Dynamo", "theirs", 29.9)], 2.99, False),
        ([(OURS, "thing", 10.0), ("Dynamo", "theirs", 30.0)], 3.0, True),
        ([("Dynamo", "theirs", 10.0)], None, None),
        ([(OURS, "thing", 10.0)], None, None),
        ([(OURS, "thing", 5.0), (LIMIT, "thing", 2.5)], None, None),  # the prototype is no peer
    ],
)
def test_a_goal_is_a_ratio_to_the_peer_of_the_same_run(values, ratio, ok):
    [row, *_] = rows_of([TINY], played(*values))
    assert (row.ratio, row.ok) == (ratio, ok)


def test_a_row_is_compared_with_another_of_ours(monkeypatch):
    monkeypatch.setattr(report, "GOALS", {"thing": {"more": 0.8}})
    game = replace(TINY, rows=(Row("thing", "a thing", "us", also="more"),))
    [row] = rows_of([game], played((OURS, "thing", 5.0), (OURS, "more", 4.5)))
    assert (row.peer_name, row.peer, row.ratio, row.ok) == ("more", 4.5, 0.9, True)
    [row] = rows_of([game], played((OURS, "thing", 5.0), (OURS, "more", 3.5)))
    assert (row.ratio, row.ok) == (0.7, False)


def test_the_first_row_of_a_request_is_of_the_default_policy():
    request = next(game for game in GAMES if game.name == "request")
    assert request.rows[0].what == "request"
    policies = [play.arguments[1:] for play in request.ours if play.module.endswith("request")]
    assert () in policies
    assert len(list(chosen(["request.retention"]))) == 1


@pytest.mark.parametrize("share", [0.8131, 0.815, 0.8169])
def test_lru_shares_that_are_right(share):
    assert check([lru(share)]) == [f"vLLM finds {100 * share:.2f} % of the prompt blocks (request)"]


@pytest.mark.parametrize("share", [0.74, 0.8129, 0.8171])
def test_another_trace_is_not_reported(share):
    with pytest.raises(PlayedWronglyError, match=f"{100 * share:.2f} %.*81.5 % ± 0.2.*100000"):
        check([lru(0.815), lru(share)])


def test_only_lru_on_the_common_trace_is_judged():
    others = [
        lru(0.74, OURS, policy="learned"),
        lru(0.74, OURS, policy="retention"),
        lru(0.807, "vLLM ARC", policy="arc"),
        lru(0.9, blocks=1_000_000),
        lru(0.7, seed=5),
        line(OURS, "decode", 0.2),
    ]
    assert check(others) == []


@pytest.mark.usefixtures("installed")
def test_rounds_alternate_and_a_missing_peer_is_named(monkeypatch):
    plays = schedule([TINY], 2, peers=True)
    assert [play.environment for play in plays] == ["dynamo", OURS, "dynamo", OURS]
    assert [play.environment for play in schedule([TINY], 2, peers=False)] == [OURS, OURS]
    assert len(schedule([replace(TINY, once=True)], 2, peers=True)) == 2
    [words] = missing([TINY, TINY])
    assert words.startswith("vllm: skipped, not installed; `make peers ARGS=vllm`")
    monkeypatch.setenv(referee.PROTOTYPE, "folder")
    assert [play.environment for play in schedule([TINY], 1, peers=False)] == [OURS, LIMIT]


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


def test_every_row_has_one_name_a_driver_and_every_goal_a_row():
    names = [row.what for game in GAMES for row in game.rows]
    assert len(names) == len(set(names))
    assert set(GOALS) <= set(names)
    assert all(row.less is None or row.less in names for game in GAMES for row in game.rows)
    played = []
    for game in GAMES:
        benches = [play.arguments[0] for play in game.ours if play.module == rust.__name__]
        wanted = {(what, of[1]) for name in benches for what, of in rust.BENCHES[name][2].items()}
        assert not benches or {(row.what, row.unit) for row in game.rows} == wanted
        played += benches
    assert sorted(played) == sorted(rust.BENCHES)


def test_criterion_has_the_benches_that_are_asked_for():
    manifest = tomllib.loads((ROOT / "rust/core/Cargo.toml").read_text())
    names = {bench["name"] for bench in manifest["bench"]}
    for bench, _, figures in rust.BENCHES.values():
        assert bench in names
        source = (ROOT / f"rust/core/benches/{bench}.rs").read_text()
        for identifier, *_ in figures.values():
            group = identifier.replace("1/64", "1:64").split("/")[0].replace("1:64", "1/64")
            assert f'"{group}"' in source, (bench, identifier)


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
    assert set(row) == COLUMNS
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


def test_samples_of_criterion_are_read(tmp_path):
    for name, times in (("one, 7 classes", [30.0, 90.0, 60.0]), ("30 in a run", [9.0, 9.0, 9.0])):
        folder = tmp_path / "victims" / name / "1000000" / "new"
        folder.mkdir(parents=True)
        told = {"full_id": f"victims/{name}/1000000"}
        (folder / "benchmark.json").write_text(json.dumps(told))
        sample = {"iters": [1.0, 3.0, 2.0], "times": times}
        (folder / "sample.json").write_text(json.dumps(sample))
    assert rust.median_ns(tmp_path, "victims/one, */1000000") == (30.0, 3)
    assert rust.median_ns(tmp_path, "victims/30 in a run/1000000") == (4.5, 3)


def test_the_clock_adds_parts_per_request():
    clock = Clock("a", "b")
    clock.samples["a"].extend([1e-6, 3e-6])
    clock.samples["b"].extend([1e-6, 1e-6])
    assert clock.us().tolist() == pytest.approx([2.0, 4.0])
    assert clock.us("a").tolist() == pytest.approx([1.0, 3.0])
    assert clock.means() == {"a": 2.0, "b": 1.0}
    clock.now["a"] = 5e-6
    clock.next()
    assert clock.us("a", "b").tolist() == pytest.approx([2.0, 4.0, 5.0])
    assert percentile(np.arange(100.0), 0.99) == 99.0


@pytest.mark.parametrize("name", ["core", "disk", "transfer"])
def test_what_is_kept_has_the_schema_and_verdicts_that_follow_from_it(name):
    kept = json.loads((RESULTS / f"{name}.json").read_text())
    assert set(kept) == {"place", "rows"}
    assert {"date", "cpu", "cores", "load"} <= kept["place"].keys()
    for row in kept["rows"]:
        assert set(row) == COLUMNS
        judged = row["ratio"] is not None and row["goal"] is not None
        assert row["ok"] == (row["ratio"] >= row["goal"] if judged else None), row["what"]


def test_a_document_is_read_as_it_was_written(tmp_path):
    rows = [Result("a", 1.5, "us", 3.0, "peer", 2.0, 1.9, ok=True, more={"rounds": 2})]
    write(tmp_path / "new/a.json", document({"date": "today"}, rows))
    assert read(tmp_path / "new/a.json") == ({"date": "today"}, rows)
    assert read(tmp_path / "b.json") == ({}, [])


@pytest.mark.parametrize(("ours", "ok"), [(1.4, True), (1.6, False)])
def test_a_bounded_row_is_judged_by_ours_over_the_peers(ours, ok):
    row = bounded("step", ours, 1.0, "s", "peer", 1.5, rounds=2)
    assert (row.ratio, row.goal, row.ok) == (round(1 / ours, 3), 0.667, ok)
    assert bounded("step", 0.0, 1.0, "s", "peer") == Result("step", 0, "s", 1, "peer", 1e6)


def test_a_row_reports_median_and_quartiles_of_the_ratios_of_its_rounds():
    pairs = {
        ("request", "us"): [(8.0, 10.0), (9.0, 10.0), (10.0, 10.0), (11.0, 10.0), (20.0, 10.0)]
    }
    (row,) = against.compared(pairs)
    assert (row.ours, row.theirs) == (10.0, 10.0)
    assert (row.low, row.ratio, row.high) == (0.9, 1.0, 1.1)
    assert row.ok


@pytest.mark.parametrize(
    ("what", "ratio", "ok"),
    [
        ("request", 1.09, True),
        ("request", 1.12, False),
        ("evict.retention", 1.12, False),
        ("evict.fifo", 1.49, True),
        ("evict.fifo", 1.52, False),
    ],
)
def test_baseline_policies_alone_may_be_half_as_slow_again(what, ratio, ok):
    (row,) = against.compared({(what, "us"): [(ratio, 1.0), (ratio, 1.0)]})
    assert row.ok is ok


def test_every_driver_is_played_and_every_row_has_one():
    played = {play[0] for play in against.PLAYS}
    assert played == {"request", "leaves", "decode", "offload"}
    evicted = {what.removeprefix("evict.") for what in against.ROWS if what.startswith("evict.")}
    assert evicted == {play[2] for play in against.PLAYS if play[0] == "leaves"}


def test_a_version_that_is_not_the_one_built_is_refused(tmp_path):
    with pytest.raises(against.DriverError, match="would measure"):
        against.figures(tmp_path, ("decode",))


def test_a_part_that_fails_says_so_and_keeps_its_rows():
    def part():
        yield GpuRow("x", 1.0, "GB/s")
        raise RuntimeError("out of memory")

    assert gpu.collected(part) == ([GpuRow("x", 1.0, "GB/s")], "RuntimeError: out of memory")


def test_a_goal_is_reached_or_missed():
    assert GpuRow("x", 1.0, "GB/s", "copy", 0.85, 0.8).ok is True
    assert GpuRow("x", 1.0, "GB/s", "copy", 0.75, 0.8).ok is False
    assert GpuRow("x", 1.0, "GB/s", "copy", 0.75).ok is None
    assert "goal 80%: missed" in gpu.line(GpuRow("x", 1.0, "GB/s", "copy", 0.75, 0.8))


def cell(policy, trace, room, cost, hits=50.0, seed=0):
    return Cell(trace, seed, room, "leaf-only", 1, policy, cost, hits)


def test_goals_are_of_means_over_traces_and_of_the_worst_row():
    rows = [
        *(cell("lru", "chats", 10, 40.0, seed=seed) for seed in (0, 1, 2)),
        cell("lru", COMMON, 30_000, 50.0),
        *(cell("flat", "chats", 10, 42.0, seed=seed) for seed in (0, 1)),
        cell("flat", COMMON, 30_000, 49.0),
        cell("learned", "chats", 10, 41.0),
        cell("learned", "chats", 10, 40.0, seed=1),
        cell("learned", COMMON, 30_000, 60.0),
    ]
    figures = Figures(rows, "leaf-only", 1)
    assert figures.cell("learned", ("chats", 10)) == (40.5, 50.0)
    assert figures.mean("learned") == (50.25, 50.0)
    goals = {goal.what: goal for goal in goals_of(rows)}
    worst = goals["worst row - max(lru, flat)"]
    assert (worst.reached, worst.ok, worst.where) == (-1.5, False, "chats, 10 blocks")
    assert goals["mean - lru"].reached == 5.25
    assert goals["common, 30 000 - lru"].ok


@pytest.mark.parametrize(("ours", "ok"), [(0.1361, True), (0.1363, False), (0.1359, False)])
def test_a_figure_is_near_or_not(ours, ok):
    assert mooncake.near("blocks", ours, 0.1361, "by hand", 0.00015).ok is ok


def test_a_trace_is_played_by_block_and_by_token(tmp_path, monkeypatch):
    monkeypatch.setattr(mooncake, "interpreter", lambda _: None)
    write_trace(tmp_path / "trace.jsonl", conversations(seed=1))
    rows = mooncake.hits_by_block(tmp_path / "trace.jsonl")
    assert not any(row.ok for row in rows)
    tokens, said = mooncake.tokens_of_last_half(tmp_path / "trace.jsonl")
    assert [row.peer_name for row in tokens] == ["published"] * 3
    assert "not installed" in said[0]
    assert len({row.ours for row in tokens}) == 1


@pytest.mark.parametrize("there", [True, False])
def test_ratios_are_of_processor_seconds(tmp_path, monkeypatch, there):
    def run(play):
        seconds = 1.0 if play.environment == "kvtrie" else 9.0
        return [Line(play.environment, what, seconds, "s", {}) for what in simulator.GOALS]

    monkeypatch.setattr(simulator, "run", run)
    monkeypatch.setattr(simulator, "interpreter", lambda _: tmp_path if there else None)
    rows, said = simulator.beside(tmp_path)
    assert [row.ok for row in rows] == ([False, True, True, True] if there else [None] * 4)
    assert [row.ratio for row in rows] == [9.0 if there else None] * 4
    assert bool(said) is not there
