"""Prompts on their way to rows: their padding, and the column that opening brings them to."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvtrie.engines.transformers.admission import common_column, unpadded
from kvtrie.engines.transformers.rows import Row
from kvtrie.errors import ConfigError


def test_rows_without_their_padding():
    ids = torch.tensor([[1, 2, 3], [0, 4, 5]])
    mask = torch.tensor([[1, 1, 1], [0, 1, 1]])
    assert [row.tolist() for row in unpadded(ids, mask)] == [[1, 2, 3], [4, 5]]
    with pytest.raises(ConfigError, match="on the left"):
        unpadded(ids, torch.tensor([[1, 1, 0], [0, 1, 1]]))
    with pytest.raises(ConfigError, match="rows of tokens"):
        unpadded(ids[0], None)


def row(pad, matched, length):
    return Row(SimpleNamespace(tokens=matched), pad, np.arange(length))


@pytest.mark.parametrize(
    ("rows", "column"),
    [
        ([row(0, 8, 20)], 8),
        ([row(4, 8, 16), row(0, 8, 20)], 12),
        ([row(0, 0, 20), row(0, 0, 20)], 0),
        ([row(0, 8, 20), row(15, 0, 5)], 15),  # each row begins there
    ],
)
def test_rows_meet_at_the_end_of_the_longest_match(rows, column):
    assert common_column(rows, [one.lease.tokens for one in rows], None) == column


def test_rows_with_states_meet_at_the_last_border_of_a_prompt():
    rows = [row(0, 8, 20), row(4, 0, 16)]
    states = SimpleNamespace(stepwise=False, goal=lambda _, tokens: tokens + 8)
    assert common_column(rows, [8, 0], states) == 16
    states.stepwise = True
    assert common_column(rows, [8, 0], states) == 19
