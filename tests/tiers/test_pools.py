"""Pools: the memory of a tier, its two forms of slots, and copies between them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvtrie.errors import ConfigError
from kvtrie.layout import Layout
from kvtrie.shape import ModelShape
from kvtrie.tier import Tier
from kvtrie.tiers import Pool, Storage, open_pools

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


def test_equal_layouts_have_equal_digests_and_every_field_counts():
    assert Layout().digest() == Layout().digest()
    others = [
        Layout(order=("layer", "block", "kv", "token", "head", "dim")),
        Layout(strides=(6, 5, 4, 3, 2, 1)),
        Layout(dtype="bfloat16"),
        Layout(kv="split"),
        Layout(scales="head"),
        Layout(latent=True),
        Layout(alignment=4096),
        Layout(rope="plain"),
        Layout(opaque="an engine's"),
    ]
    digests = {layout.digest() for layout in [Layout(), *others]}
    assert len(digests) == len(others) + 1
    assert {len(digest) for digest in digests} == {32}


def test_a_digest_is_the_same_in_every_version():
    assert Layout().digest().hex()[:16] == "78bc20c15af8c34c"


@pytest.mark.parametrize(
    "wrong",
    [
        {"order": ("block", "layer", "kv", "token", "head")},
        {"strides": (1, 2)},
        {"dtype": "float31"},
        {"kv": "both"},
        {"scales": "some"},
        {"rope": "yes"},
        {"alignment": 0},
    ],
)
def test_a_layout_that_cannot_be_is_refused(wrong):
    with pytest.raises(ConfigError):
        Layout(**wrong)


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


def test_layers_of_a_block_are_adjacent():
    pool = Pool(SHAPE, 4, 8)
    assert pool.units(2, 0, 3).tolist() == [6, 7, 8]
    assert pool.units(2, 1, 2).tolist() == [7]
    assert pool.table(np.array([2, 0], dtype=np.uint32)).tolist() == [[6, 0], [7, 1], [8, 2]]


def test_any_layer_sits_in_any_layer_slot():
    pool = Pool(SHAPE, 4, 8, layer_slots=True)
    assert pool.units(11, 2, 3).tolist() == [11]
    slots = np.array([[3, 9], [0, 11], [7, 1]], dtype=np.uint32)
    assert pool.table(slots).tolist() == slots.tolist()
    with pytest.raises(ConfigError, match="one layer"):
        pool.units(3, 0, 2)


def test_slots_beyond_the_pool_are_refused():
    for pool, slot in ((Pool(SHAPE, 4, 8), 4), (Pool(SHAPE, 4, 8, layer_slots=True), 12)):
        with pytest.raises(ConfigError, match="outside a pool"):
            pool.units(slot, 0, 1)


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


@pytest.mark.parametrize(
    ("layout", "difference"),
    [
        (Layout(alignment=512), "alignment 1 and 512"),
        (Layout(kv="split", rope="plain"), "kv joined and split, rope rotated and plain"),
    ],
)
@pytest.mark.parametrize("at", [0, 1, 2])
def test_tiers_with_different_layouts_are_refused(layout, difference, at, tmp_path):
    folder = tmp_path / "kv"
    tiers = [
        Tier("gpu", blocks=4),
        Tier("host", blocks=4),
        Tier("disk", blocks=4, path=str(folder)),
    ]
    tiers[at] = replace(tiers[at], layout=layout)
    if at == 0:  # the others are compared with the first
        difference = ", ".join(
            f"{name} {there} and {here}"
            for name, here, _, there in (one.split() for one in difference.split(", "))
        )
    above, below = at - 1 if at else 0, at or 1
    names = [f"tier {one} ({tiers[one].kind})" for one in (above, below)]
    pair = f"{names[0]} and {names[1]} differ: {difference}"
    with pytest.raises(ConfigError) as refused:
        open_pools(SHAPE, tiers, 8)
    assert str(refused.value) == pair
    assert not folder.exists()


def test_a_tier_that_is_not_opened_here_may_have_any_layout():
    layout = Layout(alignment=512)
    tiers = [Tier("gpu", blocks=2, layout=layout), Tier("disk", blocks=9)]
    assert open_pools(SHAPE, tiers, 8)[1] is None
    tiers = [Tier("gpu", blocks=2, owner="engine"), Tier("host", blocks=9, layout=layout)]
    assert open_pools(SHAPE, tiers, 8)[1].layout == layout


@pytest.mark.parametrize("layout", [None, Layout(), Layout(alignment=4096), Layout(kv="split")])
@pytest.mark.parametrize("shape", [SHAPE, replace(SHAPE, kv_heads=4, tp=2)])
def test_room_in_bytes_counts_what_the_layout_takes(layout, shape):
    budget = 100_000
    tier = Tier("host", bytes=budget, layout=layout)
    pool = Pool.of_tier(shape, tier, 8, device="cpu", pinned=False)
    taken = sum(plane.nbytes for plane in pool.planes)
    assert pool.blocks == tier.room(shape, 8)
    assert budget - taken // pool.blocks < taken <= budget


def test_room_that_holds_no_aligned_block_is_refused():
    tier = Tier("host", bytes=3 * 4096 - 1, layout=Layout(alignment=4096))
    assert Tier("host", bytes=3 * 4096 - 1).room(SHAPE, 8) == 7
    with pytest.raises(ConfigError, match="12287 bytes, which is 0 blocks of 12288"):
        tier.room(SHAPE, 8)


@pytest.mark.parametrize(("rank", "ranks"), [(2, 2), (-1, 1), (0, 0)])
def test_a_rank_that_is_not_there_is_refused(rank, ranks):
    with pytest.raises(ConfigError, match=f"rank is {rank}, 0 to {ranks - 1} wanted"):
        open_pools(SHAPE, [Tier("gpu", blocks=2)], 8, rank=rank, ranks=ranks)


def test_pools_are_opened_for_the_tiers_that_have_memory():
    tiers = [
        Tier("gpu", blocks=2, layer_slots=True),
        Tier("host", bytes=5 * SHAPE.block_bytes(8)),
        Tier("disk", blocks=9),
    ]
    gpu, host, disk = open_pools(SHAPE, tiers, 8)
    assert (gpu.blocks, gpu.layer_slots) == (2, True)
    assert (host.blocks, host.layer_slots) == (5, False)
    assert disk is None
    assert open_pools(SHAPE, [Tier("gpu", blocks=2, owner="engine")], 8) == (None,)
    assert gpu.device.type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.gpu
def test_host_memory_is_pinned_beside_a_gpu():
    gpu, host = open_pools(SHAPE, [Tier("gpu", blocks=2), Tier("host", blocks=2)], 8)
    assert gpu.device.type == "cuda"
    assert all(plane.is_pinned() for plane in host.planes)


def test_storage_is_a_protocol_that_a_disk_can_meet():
    class Shelf:
        def read(self, key, slot, layers, memory): ...

        def write(self, key, slot, layers, memory, label): ...

    assert isinstance(Shelf(), Storage)
    assert not isinstance(object(), Storage)
