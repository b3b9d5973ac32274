"""Shares of tiers: blocks that sessions share count once."""

import numpy as np
import pytest

from kvtrie.demo.residency import DROPPED, share

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


def test_shared_blocks_count_once():
    one = np.array([[0, 0, 1], [0, 0, DROPPED]], dtype=np.int8)
    two = np.array([[0, 0, 0, 1], [0, 0, 1, 1]], dtype=np.int8)
    assert share([one, two], 2, 2) == [2.5, 2.0, 0.5]
