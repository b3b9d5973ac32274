"""The rule of the simulator's router `locality`, for requests of a deployment."""

from __future__ import annotations

import pytest

from kvtrie import ConfigError
from kvtrie.cluster import locality


@pytest.mark.parametrize(
    ("candidates", "ratio", "chosen"),
    [
        ([(1, 48), (0, 16), (0, 0)], 2.0, 0),
        ([(2, 48), (0, 16), (0, 0)], 2.0, 1),  # with this request 3 to 1
        ([(2, 48), (0, 16), (0, 0)], 3.0, 0),
        ([(1, 16), (0, 16), (0, 16)], 2.0, 1),  # of equal hits the least loaded, then the first
        ([(0, 0), (1, 16), (0, 0)], 1, 0),
        ([(2**64 - 1, 1), (0, 0)], 2.0**31, 1),
    ],
)
def test_hits_decide_unless_loads_differ_by_more_than_the_ratio(candidates, ratio, chosen):
    assert locality(candidates, ratio=ratio) == chosen


@pytest.mark.parametrize(
    ("candidates", "ratio", "said"),
    [
        ([], 2.0, "candidates is empty, at least one wanted"),
        ([(0, -1)], 2.0, "hit is -1, 0 to"),
        ([(True, 0)], 2.0, "load is True, a whole number"),
        ([(0,)], 2.0, "candidates is a sequence of pairs"),
        (3, 2.0, "candidates is 3, a sequence wanted"),
        ([(0, 0)] * 65_537, 2.0, "more than 65536 items"),
        ([(0, 0)], 0.5, "ratio is 0.5, 1.0 to"),
        ([(0, 0)], float("nan"), "ratio is nan, 1.0 to"),
    ],
)
def test_bad_candidates_are_one_error(candidates, ratio, said):
    with pytest.raises(ConfigError, match=said):
        locality(candidates, ratio=ratio)
