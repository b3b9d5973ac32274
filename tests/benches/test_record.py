"""Documents of measurements: one schema, whether just measured or kept."""

import json
from pathlib import Path

import pytest

from benches.record import Result, document, read, write

KEPT = Path(__file__).parents[2] / "benches/results"
COLUMNS = {"what", "ours", "peer", "peer_name", "unit", "ratio", "goal", "ok", "more"}


@pytest.mark.parametrize("name", ["core", "disk", "transfer"])
def test_what_is_kept_has_the_schema_and_verdicts_that_follow_from_it(name):
    kept = json.loads((KEPT / f"{name}.json").read_text())
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
