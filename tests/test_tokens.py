"""Tokens come in as any sequence of integers, and as nothing else."""

from __future__ import annotations

import array

import numpy as np
import pytest
from serving import one_tier, serve

from kvtrie import ConfigError


class Tensor:
    """Replaces a CPU tensor: it has only `__array__`."""

    def __init__(self, values):
        self.values = values

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.values, dtype=dtype)


IDS = list(range(12))


def askew(values):
    """The same numbers at addresses that their type forbids."""
    return np.frombuffer(b"-" + values.tobytes(), values.dtype, offset=1)


@pytest.mark.parametrize(
    "given",
    [
        IDS,
        tuple(IDS),
        range(12),
        [np.int64(token) for token in IDS],
        *(np.array(IDS, dtype=kind) for kind in "bBhHiIlLqQ"),
        np.array(IDS, dtype=np.int64)[::-1][::-1],
        np.repeat(np.array(IDS, dtype=np.uint32), 2)[::2],
        np.repeat(np.array(IDS, dtype=np.int32), 2)[::2],
        *(askew(np.array(IDS, dtype=kind)) for kind in "IilL"),
        array.array("I", IDS),
        array.array("q", IDS),
        memoryview(array.array("i", IDS)),
        memoryview(np.array(IDS, dtype=np.uint32)),
        memoryview(np.array(IDS, dtype=np.int64))[::1],
        Tensor(IDS),
    ],
    ids=lambda given: f"{type(given).__name__}-{getattr(given, 'dtype', '')}",
)
def test_tokens_come_in_as_any_sequence_of_integers(given):
    manager = one_tier()
    serve(manager, np.array(IDS), now=1)
    assert manager.lookup(given, now=2, keep=0).tokens == 12
    lease = manager.acquire(given, now=3, keep=0)
    assert lease.matched == 12


def test_a_tensor_comes_in():
    torch = pytest.importorskip("torch")
    manager = one_tier()
    serve(manager, np.array(IDS), now=1)
    for dtype in (torch.int64, torch.int32, torch.uint8):
        assert manager.lookup(torch.tensor(IDS, dtype=dtype), now=2, keep=0).tokens == 12
    with pytest.raises(ConfigError, match="float32"):
        manager.lookup(torch.ones(4), now=2)


def test_a_long_array_is_taken_as_a_short_one_is():
    ids = np.arange(5000)
    manager = one_tier(blocks=1250)
    manager.mark(ids, "gpu", present=True, now=1)
    for kind in (np.uint32, np.int32, np.int64):
        given = ids.astype(kind)
        assert manager.lookup(given, now=2, keep=0).tokens == 5000
        assert manager.lookup(np.repeat(given, 2)[::2], now=2, keep=0).tokens == 5000
        assert manager.lookup(askew(given), now=2, keep=0).tokens == 5000
        given[4000] += 1
        assert manager.lookup(given, now=2, keep=0).tokens == 4000
        if given.dtype.kind == "i":
            given[4500] = -7
            with pytest.raises(ConfigError, match="token 4500 is -7"):
                manager.lookup(given, now=2)


def test_tokens_of_the_whole_range_are_told_apart():
    manager = one_tier()
    high = np.full(4, 2**32 - 1, dtype=np.uint64)
    serve(manager, high, now=1)
    assert manager.lookup(high, now=2, keep=0).tokens == 4
    assert manager.lookup(high - 1, now=2, keep=0).tokens == 0
    block = manager.lookup([2**32 - 1] * 4, now=2, keep=0).blocks[0]
    assert block.tokens.tolist() == [2**32 - 1] * 4


def test_no_tokens_at_all():
    manager = one_tier()
    for nothing in ([], (), np.array([]), np.array([], dtype=np.int64)):
        assert manager.lookup(nothing, now=1).tokens == 0
        with pytest.raises(ConfigError, match="an empty prompt"):
            manager.acquire(nothing, now=1)
    lease = manager.acquire([7], now=1)
    assert (lease.matched, len(lease.slots())) == (0, 1)
