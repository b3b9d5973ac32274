"""Buffers of a selective cache: rows and codes keep their bits, and memory is given back."""

from __future__ import annotations

import pytest
import torch
from playing import BUFFERS, SIZES, play, step

from kvtrie.errors import ClosedError
from kvtrie.selective import (
    make_cache,
)


@pytest.mark.parametrize("buffers", BUFFERS)
def test_buffers_keep_what_loops_keep(buffers):
    policy = "h2o" if buffers == "default" else "qh2o-vlen"
    play(policy, buffers, 7, total=45, grace_period=3, sinks=2)


@pytest.mark.parametrize("buffers", BUFFERS)
def test_untouched_rows_do_not_drift(buffers):
    """Sinks stay the same bits while ten thousand tokens pass them."""
    cache = make_cache(f"lastrec-{buffers}", cache_length=40, dtype=torch.float32, sinks=4, **SIZES)
    generator = torch.Generator().manual_seed(13)
    cache(*step(generator, 40))
    before = [plane[:, :, :4].clone() for plane in cache.buffers.planes]
    seen = [plane[:, :, :4].clone() for plane in cache.keys_values()]
    given = step(generator, 36)
    for new in (36,) * 275 + (1,) * 100:
        cache(*(each[:, :, :new] for each in given))
    assert cache.input_pos == 10_040
    for old, plane in zip(before, cache.buffers.planes, strict=True):
        assert torch.equal(old, plane[:, :, :4])
    for old, plane in zip(seen, cache.keys_values(), strict=True):
        assert torch.equal(old, plane[:, :, :4])


@pytest.mark.parametrize("policy", ["lastrec", "h2o", "qh2o-vlen", "snapkv", "mix-h2o+keydiff"])
def test_a_shared_working_copy_changes_nothing(policy):
    from kvtrie.selective.buffers import WorkingCopy

    shared = WorkingCopy()
    made = {"cache_length": 9, "dtype": torch.float32, **SIZES}
    name = f"{policy}-torch-quantized8"
    pair = [make_cache(name, working=shared, **made) for _ in range(2)]
    alone = [make_cache(name, **made) for _ in range(2)]
    generator = torch.Generator().manual_seed(14)
    for new in (5, 4, 3, 6, 1):
        for one, other in zip(pair, alone, strict=True):
            given = step(generator, new)
            assert torch.equal(one(*given), other(*given))
            for mine, theirs in zip(one.buffers.planes, other.buffers.planes, strict=True):
                assert torch.equal(mine, theirs)


@pytest.mark.deep
@pytest.mark.parametrize("buffers", BUFFERS)
def test_untouched_rows_do_not_drift_in_ten_thousand_steps(buffers):
    cache = make_cache(f"h2o-{buffers}", cache_length=12, dtype=torch.float32, sinks=4, **SIZES)
    generator = torch.Generator().manual_seed(19)
    cache(*step(generator, 12))
    rows = cache.token_pos < 4
    before = [plane[rows] for plane in (*cache.buffers.planes, *cache.keys_values())]
    given = step(generator, 1)
    for _ in range(10_000):
        cache(*given)
    assert torch.equal(cache.token_pos < 4, rows)
    after = [plane[rows] for plane in (*cache.buffers.planes, *cache.keys_values())]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


@pytest.mark.parametrize("buffers", BUFFERS)
def test_buffers_give_their_memory_back_and_take_it_again(buffers):
    made = {"cache_length": 8, "dtype": torch.float32, **SIZES}
    cache, other = (make_cache(f"h2o-{buffers}", **made) for _ in range(2))
    generator = torch.Generator().manual_seed(5)
    for new in (8, 3):
        given = step(generator, new)
        cache(*given)
        other(*given)
    held, size = cache.state(), cache.buffers.nbytes
    held = ({name: each.clone() for name, each in held[0].items()}, held[1])
    cache.buffers.deallocate()
    with pytest.raises(ClosedError, match="call allocate"):
        cache.keys_values()
    cache.buffers.allocate()
    assert cache.buffers.nbytes == size
    cache.load_state(*held)
    given = step(generator, 4)
    assert torch.equal(cache(*given), other(*given))
