"""Our drivers print what the rows are read from, on traces of seconds. Nothing asserts a time."""

import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benches import crowds, scaling
from benches.core.referee import parse
from benches.core.rows import GAMES, OURS
from benches.measure import Clock, percentile
from benches.ours import decode, leaves, memory, offload, request, rust, store

SMALL = {
    "request": [
        (request, f"--policy {name} --conversations 60 --blocks 20000")
        for name in ("lru", "learned", "retention")
    ],
    "evict": [(leaves, f"--policy {name} --leaves 40 --steps 5") for name in ("lru", "flat")],
    "decode": [(decode, "--requests 3 --steps 40 --prompt 100")],
    "store": [(store, "--blocks 2000 --calls 3")],
    "memory": [
        (memory, f"{what} --blocks 3000 --conversations 60")
        for what in ("1", "2", "3", "sequences")
    ],
    "offload": [(offload, "--conversations 80 --gpu 14000 --blocks 15000")],
}


def lines_of(driver, words, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["driver", *words.split()])
    driver.main()
    return parse(capsys.readouterr().out.splitlines())


@pytest.mark.parametrize("game", SMALL)
def test_a_driver_gives_the_rows_of_its_game(game, monkeypatch, capsys):
    lines = [
        line
        for driver, words in SMALL[game]
        for line in lines_of(driver, words, monkeypatch, capsys)
    ]
    [rows] = [each.rows for each in GAMES if each.name == game]
    given = {line.what: line.unit for line in lines}
    asked = {row.what: row.unit for row in rows if game != "evict" or row.what in given}
    assert given == asked
    assert {line.peer for line in lines} == {OURS}
    assert all(line.value > 0 for line in lines)


def test_every_play_names_a_driver_and_its_arguments():
    for game in GAMES:
        for play in game.ours:
            assert play.module.rpartition(".")[0] in {"benches.ours", "benches"}


def test_a_request_finds_what_was_there_before(monkeypatch, capsys):
    words = "--policy lru --conversations 60 --blocks 20000"
    [line] = lines_of(request, words, monkeypatch, capsys)
    assert line.what == "request.lru"
    # All fits: every block of an earlier turn is found, and all but the first system prompts.
    assert 0.75 < line.context["hit_rate"] < 1


def test_the_offload_tier_is_read_and_written(monkeypatch, capsys):
    words = SMALL["offload"][0][1]
    [line] = lines_of(offload, words, monkeypatch, capsys)
    assert line.context["stores"] > 0
    assert set(line.context["parts"]) == set(offload.PARTS)


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


def test_rust_gives_the_rows_of_its_games():
    played = []
    for game in GAMES:
        names = [play.arguments[0] for play in game.ours if play.module == rust.__name__]
        told = [rust.BENCHES[name][2].items() for name in names]
        wanted = {(what, unit) for rows in told for what, (_, unit, _) in rows}
        if names:
            assert {(row.what, row.unit) for row in game.rows} == wanted
        played += names
    assert sorted(played) == sorted(rust.BENCHES)


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


def test_scaling_writes_numbers_and_a_picture(tmp_path, monkeypatch, capsys):
    out, drawn = tmp_path / "scaling.json", tmp_path / "scaling.png"
    words = f"--sizes 1024 2048 --crowds 10 30 --out {out} --picture {drawn}"
    monkeypatch.setattr("sys.argv", ["scaling", *words.split()])
    assert scaling.main() == 0
    told = json.loads(out.read_text())
    assert [row["blocks"] for row in told["rows"]] == [1024, 2048]
    assert all(set(row) == {"blocks", *scaling.LABELS} for row in told["rows"])
    assert set(told["worst_call"]["calls"]) == {"acquire", "commit", "release"}
    assert [row["beside"] for row in told["crowds"]] == [10, 30]
    assert all(set(row) == {"beside", *crowds.LABELS} for row in told["crowds"])
    assert drawn.read_bytes().startswith(b"\x89PNG")
    assert "worst commit while filling to 2,048 blocks" in capsys.readouterr().out
    before, again = drawn.read_bytes(), out.read_text()
    drawn.unlink()
    monkeypatch.setattr("sys.argv", ["scaling", *words.split(), "--redraw"])
    assert scaling.main() == 0
    assert (drawn.read_bytes(), out.read_text()) == (before, again)


@given(st.lists(st.floats(-9, 9), min_size=1, max_size=9), st.floats(0.01, 2))
def test_labels_of_a_picture_keep_their_order_and_do_not_touch(ends, apart):
    named = {str(i): end for i, end in enumerate(ends)}
    at = scaling.spread(named, apart)
    order = sorted(named, key=named.__getitem__)
    heights = [at[name] for name in order]
    assert all(over - under >= apart * 0.999 for under, over in pairwise(heights))
    assert sum(heights) == pytest.approx(sum(ends), abs=1e-6)
    far = [abs(a - b) >= apart for a, b in pairwise(sorted(ends))]
    if all(far):
        assert at == pytest.approx(named)


def test_scaling_refuses_what_is_too_small(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["scaling", "--sizes", "100"])
    with pytest.raises(SystemExit):
        scaling.main()
    assert "100 blocks: at least 512 are needed" in capsys.readouterr().err
