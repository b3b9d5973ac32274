"""Slots of groups of layers in one memory: their places, rows of tokens, and other formats."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from group_world import MODELS
from group_world import SIZE as FOUR

from kvtrie import LayerGroup, ModelShape, ResumePoints, Tier
from kvtrie.errors import ConfigError
from kvtrie.model.group_pages import GroupPages
from kvtrie.model.layout import FORMATS, Layout
from kvtrie.tiers import Pool, open_pools

SIZE = 32
FULL = LayerGroup((0, 3))
WINDOW = LayerGroup((1, 2), kind="sliding", window=40, kv_heads=1, head_dim=64)
STATE = LayerGroup((4,), kind="state", state_bytes=1200)
MODEL = ModelShape(5, 2, 32, groups=(FULL, WINDOW, STATE))
GPU = Tier("gpu", bytes="2MB")


def test_slots_of_two_groups_never_share_bytes():
    resume, tier = ResumePoints(), Tier("gpu", bytes=40_000)
    model = ModelShape(8, 2, 8, groups=MODELS["four groups"])
    (pools,) = open_pools(model, [tier], FOUR, resume=resume)
    for pool in pools.groups:
        pools.planes[0].zero_()
        for slot in range(pool.blocks):
            assert not pool.block(slot).any()
            pool.block(slot).fill_(1)


def test_rows_of_tokens_are_where_the_view_of_a_unit_has_them():
    model = ModelShape(8, 2, 8, groups=MODELS["other heads and sinks"])
    (pools,) = open_pools(model, [Tier("gpu", bytes=60_000)], FOUR, resume=ResumePoints())
    generator = torch.Generator().manual_seed(0)
    for pool in pools.groups:
        fmt = pool.block_format
        units = torch.tensor([slot * pool.layers + slot % pool.layers for slot in (0, 3, 8, 5)])
        offsets = torch.tensor([1, 0, 3, 2])
        keys = torch.randn(4, fmt.heads, fmt.head_dim, generator=generator)
        values = torch.randn(4, fmt.heads, fmt.v_head_dim, generator=generator)
        pool.scatter(units, offsets, keys, values)
        found = pool.gather(units, offsets)
        assert torch.equal(found[0], keys)
        assert torch.equal(found[1], values)
        for at, (unit, offset) in enumerate(zip(units.tolist(), offsets.tolist(), strict=True)):
            mine, theirs = pool.view(unit)
            assert torch.equal(mine[offset], keys[at])
            assert torch.equal(theirs[offset], values[at])


@pytest.mark.parametrize("groups", MODELS.values(), ids=MODELS)
def test_rows_of_units_are_where_their_layers_are(groups):
    model = ModelShape(8, 2, 8, groups=groups)
    (pools,) = open_pools(model, [Tier("gpu", bytes=60_000)], FOUR, resume=ResumePoints())
    generator = torch.Generator().manual_seed(0)
    memory = pools.planes[0].view(-1)
    memory.copy_(torch.randint(0, 256, memory.shape, dtype=torch.uint8, generator=generator))
    for pool in pools.groups:
        wide = pool.slots.wide
        for slot in (0, 3, pool.blocks - 1):
            for layer in range(pool.layers):
                units = pool.units(slot, layer, layer + 1)
                mine = memory.view(-1, wide)[pool.slots.rows(units, wide)].view(-1)
                assert torch.equal(mine, pool.block(slot).view(pool.layers, -1)[layer])
                assert torch.equal(mine, pool.layer_bytes(slot, (layer, layer + 1))[0])
        with pytest.raises(ConfigError, match="outside a pool"):
            pool.block(pool.blocks)


def test_a_model_with_one_group_has_one_slot_per_page():
    pool = Pool(ModelShape(3, 2, 8), 5, SIZE)
    assert pool.groups == (pool,)
    assert (pool.slots.per_page, pool.slots.page) == (1, 3 * pool.unit_bytes)
    assert pool.slots.even
    units = np.array([7, 2, 14])
    assert pool.slots.rows(units, pool.unit_bytes).tolist() == units.tolist()
    assert pool.nbytes == sum(plane.nbytes for plane in pool.planes) == 5 * pool.slots.page


def test_bytes_of_a_group_go_to_no_other_group():
    first, second = open_pools(MODEL, [GPU, replace(GPU, kind="host")], SIZE, resume=ResumePoints())
    with pytest.raises(ConfigError, match="same group"):
        second.groups[1].copy_from(first, np.array([0]), np.array([0]))


@pytest.mark.parametrize("name", [name for name, layout in FORMATS.items() if layout])
def test_a_format_gives_the_numbers_of_a_pool_of_all_layers_and_states_stay(name):
    host = Tier("host", bytes="2MB", layout=FORMATS[name])
    first, second = open_pools(MODEL, [GPU, host], SIZE, resume=ResumePoints())
    generator = torch.Generator().manual_seed(1)
    native, coded = GroupPages.of(MODEL, GPU, SIZE), GroupPages.of(MODEL, host, SIZE)
    assert native.slots[0] > 2 * coded.slots[0]
    assert native.slots[2] == coded.slots[2] == 1200
    slots = np.array([7, 0, 3])
    for group, (source, target) in enumerate(zip(first.groups, second.groups, strict=True)):
        source_units = source.layer_units(slots, 0)[:, None] + np.arange(source.layers)
        target_units = target.layer_units(slots[::-1] + 2, 0)[:, None] + np.arange(target.layers)
        if source.state:
            source.block(3).fill_(7)
        else:
            shape = source.view(0)[0].shape
            for unit in source_units.flat:
                for part in source.view(int(unit)):
                    part.copy_(torch.randn(shape, generator=generator))
        target.copy_from(source, source_units.flatten(), target_units.flatten())
        before = [source.block(slot).clone() for slot in slots.tolist()]
        for slot in slots.tolist():
            source.block(slot).fill_(255)
        source.copy_from(target, target_units.flatten(), source_units.flatten())
        after = [source.block(slot) for slot in slots.tolist()]
        if source.state:
            assert all(map(torch.equal, before, after))
            continue
        heads, dim, _, _, _ = MODEL.form(group)
        shape = ModelShape(source.layers, heads, dim)
        plain = Pool(shape, 3, SIZE, layout=Layout(kv="split"))
        below = Pool(shape, 3, SIZE, layout=replace(FORMATS[name], kv="split"))
        units, half = np.arange(3 * source.layers), SIZE * heads * dim * 4
        rows = torch.cat(before).view(len(units), -1)
        plain.planes[0].copy_(rows[:, :half])
        plain.planes[1].copy_(rows[:, half:])
        below.copy_from(plain, units, units)
        plain.copy_from(below, units, units)
        expected = torch.cat(plain.planes, dim=1)
        assert torch.equal(torch.cat(after).view(len(units), -1), expected)
        assert not torch.equal(expected, rows)


def test_formats_that_groups_cannot_have_are_refused():
    with pytest.raises(ConfigError, match="another dtype and scales, and nothing else"):
        open_pools(
            MODEL,
            [GPU, Tier("host", bytes="2MB", layout=Layout(kv="split"))],
            SIZE,
            resume=ResumePoints(),
        )
    coded = Tier("host", bytes="2MB", layout=FORMATS["int8"])
    with pytest.raises(ConfigError, match="first tier is native"):
        open_pools(MODEL, [replace(coded, kind="gpu")], SIZE, resume=ResumePoints())
    disk = Tier("disk", bytes="2MB", path="kv")
    with pytest.raises(ConfigError, match="a disk or a store has the layout of the tier above"):
        open_pools(MODEL, [GPU, coded, disk], SIZE, resume=ResumePoints())
    small = replace(MODEL, groups=(replace(FULL, head_dim=3), STATE))
    with pytest.raises(ConfigError, match="3"):
        open_pools(small, [GPU, coded], SIZE, resume=ResumePoints())
    with pytest.raises(ConfigError, match="no rows of tokens"):
        open_pools(MODEL, [GPU, coded], SIZE, resume=ResumePoints())[1].groups[0].gather(
            torch.tensor([0]), torch.tensor([0])
        )
