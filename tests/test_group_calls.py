"""Calls of a manager that keeps groups of layers apart, through Python."""

from __future__ import annotations

import numpy as np
import pytest

from kvtrie import BlockManager, Index, LayerGroup, ModelShape, ResumePoints, Tier
from kvtrie.errors import ConfigError

MODEL = ModelShape(
    4,
    1,
    8,
    "float32",
    groups=(LayerGroup((0, 2)), LayerGroup((1, 3), kind="sliding", window=9)),
    fingerprint="test",
)


def two_tiers():
    tiers = [Tier(kind, bytes="1MiB", owner="none") for kind in ("gpu", "host")]
    return BlockManager(MODEL, tiers, block_tokens=4, resume=ResumePoints())


def serve(manager, tokens, now):
    lease = manager.acquire(tokens, now=now)
    lease.commit(tokens[lease.matched :], now=now)
    return lease


def test_a_plan_names_the_borders_of_passes_and_a_truncated_lease_goes_back_to_one():
    manager = two_tiers()
    tokens = np.arange(26, dtype=np.uint32)
    lease = manager.acquire(tokens, now=1)
    assert lease.plan.resume == [24]
    lease.commit(tokens, now=1)
    lease.truncate(19, now=2)
    assert lease.tokens == 16
    with pytest.raises(ConfigError, match="owner is not 'engine'"):
        lease.bind(0, [1], group=1)


def test_an_index_carries_the_groups_of_its_rows():
    manager = two_tiers()
    tokens = np.arange(24, dtype=np.uint32)
    serve(manager, tokens, 1).release(now=2)
    manager.flush(now=3)
    moves = manager.moves()
    manager.complete(moves.id, now=4)
    index = manager.index("host", now=5)
    assert index.group.tolist().count(1) == 2
    assert sorted({len(row) for row in index}) == [4, 5]
    again = two_tiers()
    assert again.load_index(Index(index), now=6) == 6
    assert again.lookup(np.append(tokens, 99), now=7).tokens == 24
