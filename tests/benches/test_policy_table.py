"""The table of policies: what is played, resumed, rendered, and how rooms are compared."""

import json
from concurrent.futures import Future

import pytest

from benches import tables
from benches.policies import __main__ as door
from benches.policies.cells import ENGINE, SHORT, Job, Row, play
from benches.policies.equal import MOST, Equal, Share, crossing, share_of
from benches.policies.goals import goals_of, share_means
from benches.policies.page import page
from benches.policies.traces import COMMON, Source, engine_room


def cell(policy, trace, room, cost, hits, structure="leaf-only", **more):
    tiers = 2 if structure == ENGINE else 1
    return Row(trace, more.pop("seed", 0), room, structure, tiers, policy, cost, hits, **more)


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("share", [0.25, 0.7, 1.0, 1.6])
def test_the_share_is_where_a_growing_figure_is_reached(power, share):
    assert crossing(lambda x: x**power, share**power) == pytest.approx(share, abs=0.01)


def test_a_share_that_is_not_reached_is_the_most():
    assert crossing(lambda _: 1.0, 2.0) == MOST
    assert crossing(lambda _: 3.0, 2.0) < 0.13


def test_the_default_policy_needs_the_share_of_the_room_that_the_answer_names():
    source = Source("chats", None, 0, 300)
    lru = Job(source, 120, "leaf-only", 1, "lru")
    share = share_of(Equal(lru))
    assert (share.trace, share.room, share.structure) == ("chats", 120, "leaf-only")
    wanted = play(lru)
    enough = play(Job(source, round(120 * (share.cost + 0.08)), "leaf-only", 1, "learned"))
    assert enough.cost_saved >= wanted.cost_saved - 0.1


def test_no_request_of_the_common_trace_is_refused_below_an_engine():
    source = Source(COMMON, None, 0, 2_000)
    row = play(Job(source, 2 * engine_room(source), ENGINE, 2, "lru"))
    assert (row.refused, row.hits > 50) == (0, True)


def test_a_record_is_resumed_where_it_ended(tmp_path, monkeypatch):
    out, played = tmp_path / "policies.json", []

    def answer(job):
        played.append(job)
        return Row(*door.key_of(job), None, 50.0)

    class Pool:
        """Plays at once."""

        def __init__(self, _):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def submit(self, call, job):
            done = Future()
            done.set_result(call(job))
            return done

    monkeypatch.setattr(door, "answer", answer)
    monkeypatch.setattr(door, "ProcessPoolExecutor", Pool)
    words = ["policies", "--quick", "--modes", "1", "--out", str(out), "--json"]
    for more in ([], ["--resume"]):
        monkeypatch.setattr("sys.argv", [*words, *more])
        assert door.main() == 0
    first = json.loads(out.read_text())
    assert len(first["rows"]) == len(played)
    record = {**first, "rows": first["rows"][:-3]}
    out.write_text(json.dumps(record))
    assert door.main() == 0
    assert len(played) == len(first["rows"]) + 3
    assert len({door.key_of(job) for job in played}) == len(first["rows"])
    assert json.loads(out.read_text())["rows"] == first["rows"]


def test_the_page_has_a_table_per_shape_and_the_goals_that_are_missed():
    rows = [
        cell("lru", "chats", 10, 40.0, 50.0),
        *(cell("lru", "agents", 10, 40.0, 50.0, ENGINE, seed=seed) for seed in (0, 1)),
        cell("learned", "agents", 10, 45.0, 55.0, ENGINE),
        cell("lru", "chats", 20, 60.0, 70.0),
        cell("learned", "chats", 10, 44.0, 52.0),
        cell("learned", "chats", 20, 64.0, 72.0),
        cell("retention", "chats", 20, 61.0, 71.0),
        cell("lru", COMMON, 30_000, 48.0, 50.0, ENGINE),
        cell("learned", COMMON, 30_000, 53.0, 54.0, ENGINE),
        cell("learned", "loop", 64, None, 70.0, SHORT),
        cell("learned", "loop", 640, None, 80.0, SHORT),
    ]
    shares = [Share("chats", seed, 10, "leaf-only", 1, 0.6 + 0.1 * seed, 0.9) for seed in (0, 1)]
    goals = goals_of(rows, shares)
    reached = {goal.what: goal.reached for goal in goals}
    assert reached["leaf-only: room left at lru's cost, share"] == pytest.approx(0.35)
    assert reached["engine, learned: mean cost - lru"] == 5.0
    record = json.loads(door.text_of(rows, shares))
    text = page(record, tables.grid)
    assert "**One tier, leaf-only (1 seed)**" in text
    assert "own `lru` (2 seeds; common 1)" in text
    assert "| chats, 2 rooms | 50.0 / 60.0 | – | – | 54.0 / 62.0 | – | – | – |" in text
    assert "| common, 1 room | 48.0 / 50.0 | – | 53.0 / 54.0 | – |" in text
    assert "| agents, 1 room | 40.0 / 50.0 | – | – | – |" in text
    assert "| loop | – | – | 75.0 | – | – | – | – |" in text
    assert "| chats | 0.65 / 0.90 | – |" in text
    assert share_means(shares, "leaf-only") == {"chats": pytest.approx((0.65, 0.9))}
    missed = [goal.what for goal in goals if not goal.ok]
    assert missed
    assert all(f"| {what} |" in text for what in missed)
