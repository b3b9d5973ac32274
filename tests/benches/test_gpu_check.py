"""`make gpu-check`: one report whatever happens, and it goes on where it ended."""

import json
import sys

import pytest

from benches.gpu import check
from benches.gpu.check import ROWS, Result, Row

GOOD = Row("good", ("-m", "this"), 60)
BAD = Row("bad", ("-m", "no_such_module"), 60)


def test_without_a_card_no_row_runs_and_the_status_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(check, "device", lambda: None)
    assert check.main(["--out", str(tmp_path)]) == 2
    document = json.loads((tmp_path / "gpu-check.json").read_text())
    assert [row["name"] for row in document["rows"]] == [row.name for row in ROWS]
    assert {(row["state"], row["reason"]) for row in document["rows"]} == {
        ("not run", "no CUDA device")
    }
    assert (tmp_path / "gpu-check.md").read_text() == capsys.readouterr().out


def test_a_row_that_fails_costs_no_other_and_passed_rows_are_not_run_again(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(check, "device", lambda: "a card")
    monkeypatch.setattr(check, "ROWS", (BAD, GOOD))
    assert check.main(["--out", str(tmp_path)]) == 1
    rows = json.loads((tmp_path / "gpu-check.json").read_text())["rows"]
    assert [row["state"] for row in rows] == ["failed", "passed"]
    assert "no_such_module" in rows[0]["output"]
    ran = []

    def run(row, _seconds):
        ran.append(row.name)
        return Result(row.name, "passed", "", 1.0)

    monkeypatch.setattr(check, "carry_out", run)
    assert check.main(["--out", str(tmp_path)]) == 0
    assert ran == ["bad"]
    assert check.main(["--out", str(tmp_path), "--again"]) == 0
    assert ran == ["bad", "bad", "good"]
    monkeypatch.setattr(check, "device", lambda: "another card")
    check.main(["--out", str(tmp_path)])
    assert ran[3:] == ["bad", "good"]
    capsys.readouterr()


def test_rows_end_in_their_time():
    rows = [Row(str(at), ("-m", "this"), 300) for at in range(4)]
    limits = []

    def run(row, seconds):
        limits.append(seconds)
        return Result(row.name, "failed", "late", seconds)

    results = check.check(rows, "a card", {}, 520, run)
    assert limits == [300, 220]
    assert [one.state for one in results] == ["failed", "failed", "not run", "not run"]
    assert "run it again" in results[-1].reason


def test_a_row_past_its_time_is_ended():
    row = Row("late", ("-m", "timeit", "-n", "1", "-r", "1", "import time; time.sleep(60)"), 60)
    result = check.carry_out(row, 0.5)
    assert (result.state, result.reason) == ("failed", "no end in 0 s")


def test_a_row_whose_package_is_missing_names_it():
    row = Row("other", ("-m", "this"), 60, ("no_such_package",))
    (result,) = check.check([row], "a card", {}, 520)
    assert (result.state, result.reason) == ("not run", "no_such_package is not installed")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_row_names_files_that_exist(row):
    words = [word for word in row.command if word.startswith(("tests/", "tests\\"))]
    assert all((check.ROOT / word).exists() for word in words)
    assert check.command(row).count(sys.executable) == 1
