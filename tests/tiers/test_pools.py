"""Pools: the memory of a tier, its two forms of slots, and copies between them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvtrie.errors import ConfigError
from kvtrie.model.layout import Layout
from kvtrie.model.shape import ModelShape
from kvtrie.tiers import Pool

SHAPE = ModelShape(layers=3, kv_heads=2, head_dim=4, fingerprint="pools")
FORMS = [
    Layout(),
    Layout(kv="split"),
    Layout(alignment=512),
    Layout(kv="split", alignment=96),
]


def noise(pool, seed=0):
    """Fill a pool with bytes that differ in every place."""
    generator = torch.Generator().manual_seed(seed)
    for plane in pool.planes:
        plane.copy_(torch.randint(0, 120, plane.shape, dtype=torch.uint8, generator=generator))


def test_planes_are_whole_rows_and_aligned():
    assert Layout().planes(16, 2, 4) == (2 * 16 * 2 * 4 * 4,)
    assert Layout(kv="split").planes(16, 2, 4, 8) == (16 * 2 * 4 * 4, 16 * 2 * 8 * 4)
    assert Layout(latent=True).planes(16, 1, 576) == (16 * 576 * 4,)
    (padded,) = Layout(alignment=4096).planes(16, 3, 4)
    assert padded % 4096 == 0
    assert padded % (3 * 4 * 4) == 0
    assert padded >= 2 * 16 * 3 * 4 * 4
    with pytest.raises(ConfigError, match="split"):
        Layout().planes(16, 2, 4, 8)


@pytest.mark.parametrize("layout", FORMS)
@pytest.mark.parametrize("layer_slots", [False, True])
def test_what_is_scattered_is_gathered_bit_for_bit(layout, layer_slots):
    pool = Pool(SHAPE, 5, 8, layout=layout, layer_slots=layer_slots)
    noise(pool)
    before = [plane.clone() for plane in pool.planes]
    units = torch.tensor([14, 0, 7, 7])
    offsets = torch.tensor([7, 0, 3, 4])
    keys, values = torch.randn(4, 2, 4), torch.randn(4, 2, 4)
    pool.scatter(units, offsets, keys, values)
    got_keys, got_values = pool.gather(units, offsets)
    assert torch.equal(got_keys, keys)
    assert torch.equal(got_values, values)
    for row, (unit, offset) in enumerate(zip(units, offsets, strict=True)):
        view_keys, view_values = pool.view(int(unit))
        assert torch.equal(view_keys[offset], keys[row])
        assert torch.equal(view_values[offset], values[row])
    touched = sum(int((old != new).sum()) for old, new in zip(before, pool.planes, strict=True))
    assert touched <= 4 * 2 * 4 * 4 * 2  # four tokens of K and V, and not one byte more


def test_k_and_v_of_different_widths_need_two_planes():
    shape = replace(SHAPE, v_head_dim=6)
    pool = Pool(shape, 2, 8)
    assert pool.layout.kv == "split"
    where = torch.tensor([5]), torch.tensor([2])
    keys, values = torch.randn(1, 2, 4), torch.randn(1, 2, 6)
    pool.scatter(*where, keys, values)
    assert torch.equal(pool.gather(*where)[0], keys)
    assert torch.equal(pool.gather(*where)[1], values)


def test_a_rank_holds_its_share_of_the_heads():
    assert Pool(replace(SHAPE, tp=2), 2, 8).keys.shape[1:] == (1, 4)


@pytest.mark.parametrize("layout", FORMS)
def test_copies_between_both_forms_of_slots_keep_every_bit(layout):
    whole = Pool(SHAPE, 4, 8, layout=layout)
    single = Pool(SHAPE, 4, 8, layout=layout, layer_slots=True)
    noise(whole, 1)
    noise(single, 2)
    before = [plane.clone() for plane in single.planes]
    sources = np.concatenate([whole.units(1, 0, 3), whole.units(3, 1, 3)])
    targets = np.array([4, 5, 10, 0, 1])
    single.copy_from(whole, sources, targets)
    for plane, origin, old in zip(single.planes, whole.planes, before, strict=True):
        assert torch.equal(plane[targets], origin[sources])
        others = np.setdiff1d(np.arange(12), targets)
        assert torch.equal(plane[others], old[others])


def test_raw_copies_need_equal_layouts():
    with pytest.raises(ConfigError, match="copy between"):
        Pool(SHAPE, 1, 8).copy_from(
            Pool(SHAPE, 1, 8, layout=Layout(kv="split")), np.array([0]), np.array([0])
        )


@pytest.mark.parametrize(
    "wrong",
    [
        {"blocks": 0},
        {"layout": Layout(dtype="float16")},
        {"layout": Layout(order=("layer", "block", "kv", "token", "head", "dim"))},
        {"layout": Layout(strides=(6, 5, 4, 3, 2, 1))},
    ],
)
def test_a_pool_that_cannot_be_is_refused(wrong):
    with pytest.raises(ConfigError):
        Pool(SHAPE, **({"blocks": 1, "block_tokens": 8} | wrong))


def test_every_page_is_touched_on_opening():
    pool = Pool(SHAPE, 64, 16)
    assert all(int(plane.sum()) == 0 for plane in pool.planes)
