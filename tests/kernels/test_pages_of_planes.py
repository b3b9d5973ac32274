"""`Pages`: views of a pool's planes, where its layout says."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_pages import SIZES

from kvtrie import ModelShape
from kvtrie.kernels import Pages
from kvtrie.model.layout import Layout
from kvtrie.tiers import Pool


@given(st.permutations(["block", "layer", "kv", "token", "head"]), st.booleans(), st.data())
def test_pages_are_where_the_layout_puts_them(order, split, data):
    order = (*order, "dim")
    shape = {"block": 3, "layer": 2, "kv": 1 if split else 2, "token": 4, "head": 2, "dim": 16}
    memory = [torch.randn(math.prod(shape.values())).view(torch.uint8) for _ in range(1 + split)]
    layer = data.draw(st.integers(0, 1))
    layout = Layout(order=order, kv="split" if split else "joined")
    mine = Pages.of(memory, layout, **SIZES, layers=2, layer=layer)
    for plane in range(2):
        flat = memory[plane if split else 0].view(torch.float32).numpy()
        whole = flat.reshape([shape[axis] for axis in order])
        index = {"layer": layer, "kv": 0 if split else plane}
        wanted = whole[tuple(index.get(axis, slice(None)) for axis in order)]
        left = [axis for axis in order if axis not in index]
        wanted = wanted.transpose([left.index(axis) for axis in ("block", "token", "head", "dim")])
        assert np.array_equal(mine.planes[plane].cells.numpy(), wanted)


@pytest.mark.parametrize("kv", ["joined", "split"])
@pytest.mark.parametrize("alignment", [1, 4096])
def test_pages_of_a_pool_are_its_own_views(kv, alignment):
    model = ModelShape(layers=3, kv_heads=2, head_dim=16)
    pool = Pool(model, 3, 4, layout=Layout(kv=kv, alignment=alignment))
    for plane in pool.planes:
        plane.random_(0, 100)
    for layer in range(3):
        mine = Pages.of(pool.planes, pool.layout, **SIZES, layers=3, layer=layer)
        for block in range(3):
            keys, values = pool.view(block * 3 + layer)
            assert torch.equal(mine.planes[0].cells[block], keys)
            assert torch.equal(mine.planes[1].cells[block], values)
