"""Rows of a batch: padding, tokens that a pass may bring, and leases that rows continue."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvtrie import BlockManager, ModelShape, Tier
from kvtrie.engines.transformers.rows import (
    Row,
    check_repeated,
    fresh_tokens,
    select,
    with_retry,
)
from kvtrie.errors import ConfigError, NoSpaceError, TransferError

SIZE = 4


@pytest.fixture
def rows():
    """Rows of five and three tokens whose KV is written."""
    manager = BlockManager(ModelShape(1, 1, 4), [Tier("gpu", blocks=8)], block_tokens=SIZE)
    made = []
    for pad, tokens in ((0, np.arange(5)), (2, np.arange(10, 13))):
        lease = manager.acquire(tokens, now=1, keep=0)
        lease.commit(tokens, now=1)
        made.append(Row(lease, pad, tokens))
    yield made
    manager.audit()


def test_a_pass_brings_what_follows_the_tokens_of_each_row(rows):
    ids = torch.tensor([[5, 6], [13, 14]])
    assert [row.tolist() for row in fresh_tokens(rows, [5, 3], ids, 5)] == [[5, 6], [13, 14]]
    assert [row.tolist() for row in fresh_tokens(rows, [6, 3], ids, 5)] == [[6], [13, 14]]
    with pytest.raises(TransferError, match="2 tokens are lost"):
        fresh_tokens(rows, [3, 3], ids, 5)
    with pytest.raises(ConfigError, match="continue its prompt at token 4"):
        fresh_tokens(rows, [4, 2], ids, 4)


def test_repeated_columns_are_those_of_the_row(rows):
    ids = torch.tensor([[0, 1, 2], [0, 1, 2], [0, 0, 10], [0, 0, 11]])
    check_repeated(rows, ids[:3].repeat_interleave(2, 0)[[0, 1, 4, 5]])
    with pytest.raises(ConfigError, match="row 3 of the pass is another sequence"):
        check_repeated(rows, ids)


def test_selected_rows_have_a_lease_each_and_the_others_none(rows):
    first, second = (row.lease for row in rows)
    made = select(rows, [0, 0], now=2)
    assert second.state == "released"
    assert len({row.lease.id for row in made}) == 2
    assert first in [row.lease for row in made]
    assert [row.tokens.tolist() for row in made] == [[0, 1, 2, 3, 4]] * 2


def test_a_cut_row_forgets_columns_and_a_commit_adds_tokens(rows):
    row = rows[1].cut(4, now=2)
    assert (row.tokens.tolist(), row.lease.tokens) == ([10, 11], 2)
    row.lease.reserve(2, now=2)
    row = row.commit(np.array([7, 8]), now=2)
    assert (row.tokens.tolist(), row.lease.tokens) == ([10, 11, 7, 8], 4)


def test_room_is_asked_for_again_once_no_move_is_under_way():
    done = []
    executor = SimpleNamespace(clock=lambda: 1, poll=lambda: 0, drain=lambda: done.append("drain"))

    def ask(*, now):
        done.append(("ask", now))
        raise NoSpaceError("full", "gpu", 1, 0, 0, 0)

    with pytest.raises(NoSpaceError):
        with_retry(executor, ask)
    # Also where the last move ended after the first question: `poll` knows of none then.
    assert done == [("ask", 1), "drain", ("ask", 1)]
