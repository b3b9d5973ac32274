"""`Arrivals`: each kind has its rate and its spread, and a seed makes the same times."""

import itertools

import numpy as np
import pytest
from trace_files import SECOND

from kvtrie.sim.arrivals import Arrivals


@pytest.mark.parametrize(
    ("arrivals", "cv"),
    [(Arrivals("poisson", 4), 1), (Arrivals("gamma", 4, 3), 3), (Arrivals("gamma", 4, 0.2), 0.2)],
)
def test_arrivals_have_the_rate_and_the_spread(arrivals, cv):
    times = np.array(list(itertools.islice(arrivals.times(1), 40_000))) / SECOND
    gaps = np.diff(times)
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(0.25, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)
    assert next(arrivals.times(2)) != next(arrivals.times(1)) == next(arrivals.times(1))
