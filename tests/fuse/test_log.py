"""`FusionLog`: shares of what was computed, from a grid worked out by hand; parts of time nest."""

import numpy as np
import pytest
import torch

from kvtrie.fuse import log
from kvtrie.fuse.log import FusionLog, Reused, Stopwatch


def test_shares_and_overlaps_are_of_the_tokens_of_chunks():
    # A token of the prefix, a chunk of two tokens that is exact, one of three, and the query.
    grid = np.array(
        [
            [0, 0, 0, 1, 1, 1, 1],
            [0, 0, 0, 1, 0, 1, 1],
            [0, 0, 0, 0, 1, 0, 1],
            [0, 0, 0, 0, 0, 0, 1],
        ],
        dtype=bool,
    )
    chunks = [Reused(2, 2, 64, "hit", exact=True), Reused(3, 0, 48, "absent", exact=False)]
    found = FusionLog(chunks, grid, (1, 6), 0.3, {"recompute": 5}, waits=2)
    assert found.reused == [2, 0]
    assert found.shares == [3 / 5, 2 / 5, 1 / 5, 0]
    assert found.overlaps == [1.0, 0.0, 1.0]
    assert found.computed == pytest.approx(6 / 20)
    assert found.layers_full == 1
    row = found.as_dict()
    assert row["chunks"][1] == {
        "tokens": 3,
        "reused": 0,
        "bytes": 48,
        "state": "absent",
        "exact": False,
    }
    assert (row["ratio"], row["nanoseconds"], row["waits"]) == (0.3, {"recompute": 5}, 2)


def test_a_log_without_chunks_has_computed_nothing():
    found = FusionLog([], np.ones((2, 3), dtype=bool), (0, 0), 0.15)
    assert (found.shares, found.computed, found.layers_full) == ([0.0, 0.0], 0.0, 2)


def test_time_of_an_inner_part_is_not_that_of_the_outer_one(monkeypatch):
    times = iter([0, 10, 40, 45, 100, 107])
    monkeypatch.setattr(log.time, "perf_counter_ns", lambda: next(times))
    watch = Stopwatch(torch.device("cpu"))
    with watch.part("recompute"), watch.part("scatter"):
        pass
    with watch.part("layout"):
        pass
    assert watch.read() == {"recompute": 10 + 5, "scatter": 30, "layout": 7}
