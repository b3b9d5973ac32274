"""What `make bench-against` makes of the figures of two versions."""

from __future__ import annotations

import pytest

from benches import against


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
