"""Torch twins against a loop over single numbers: the same bits, also where nothing is written."""

from __future__ import annotations

import naive
import torch
from cases import calls, copied, written
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtrie.kernels import Plane, Rope, twin
from kvtrie.kernels.call import Call
from kvtrie.kernels.formats import CELLS


def agree(made, others):
    for one, other in zip(made, others, strict=True):
        for mine, theirs in zip(written(one), written(other), strict=True):
            assert torch.equal(mine, theirs)
        if one.deviation is not None:
            torch.testing.assert_close(one.deviation, other.deviation, rtol=1e-5, atol=1e-7)


@given(calls())
def test_twins_do_what_a_loop_does(made):
    theirs = copied(made)
    for call, other in zip(made, theirs, strict=True):
        twin.run(call)
        naive.run(other)
    agree(made, theirs)


@given(
    st.sampled_from(sorted(set(CELLS) - {torch.float32}, key=str)),
    st.floats(width=32, allow_nan=False, allow_infinity=False),
)
@settings(max_examples=10 * settings.default.max_examples)
def test_the_loop_rounds_as_torch_does(dtype, x):
    largest = naive.LARGEST.get(dtype, float("inf"))
    wide = torch.tensor([x], dtype=torch.float32).clamp(-largest, largest)
    nearest = (wide.round() if dtype == torch.int8 else wide).to(dtype)
    word = naive.WORDS[dtype.itemsize]
    assert naive.encoded(x, dtype) == int(nearest.view(word)) % 2 ** (8 * dtype.itemsize)


def test_what_does_not_turn_keeps_its_bits():
    # No kernel writes -128, but a pool may hold it.
    cells = torch.full((1, 1, 1, 1, 32), -128, dtype=torch.int8)
    plane, slots = Plane(cells, torch.ones(1, 1, 1, 1)), torch.tensor([0])
    skipped, rope = torch.ones(1, dtype=torch.uint8), Rope.of(2, 16)
    twin.run(Call("rerotate", (plane,), "tensor", slots, skipped, (), torch.tensor([1]), rope))
    assert (cells[..., 16:] == -128).all()
    assert (cells[..., :16] > -128).all()
    assert not skipped.any()


def test_tables_are_angles_in_double_precision():
    rope = Rope.of(100_000, 64, theta=1e4)
    exact = torch.arange(100_000, dtype=torch.float64)[:, None] * 1e4 ** (
        -torch.arange(0, 64, 2, dtype=torch.float64) / 64
    )
    assert torch.equal(rope.cos, exact.cos().float())
    assert torch.equal(rope.sin, exact.sin().float())
    assert (rope.length, rope.width) == (100_000, 64)
