"""The callers' view: pages in any layout, verbs on the CPU, and everything that is refused."""

from __future__ import annotations

import math
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtrie import ModelShape
from kvtrie.errors import ConfigError
from kvtrie.kernels import Pages, Plane, Rope, gather, recompute, rerotate, scatter
from kvtrie.layout import Layout
from kvtrie.tiers import Pool

SIZES = {"blocks": 3, "block_tokens": 4, "heads": 2, "head_dim": 16}


def pages(dtype="float32", scales="none", **more):
    layout = Layout(dtype=dtype, scales=scales, **more)
    sizes = layout.planes(4, 2, 16)
    memory = [torch.zeros(3 * size, dtype=torch.uint8) for size in sizes]
    given = [torch.full((1,), 0.5)] * 2 if scales == "tensor" else ()
    return Pages.of(memory, layout, **SIZES, scales=given)


def rows(tokens=2, dtype=torch.float32):
    return torch.randn(tokens, 2, 16).to(dtype)


def test_what_is_scattered_is_gathered():
    for mine in (pages(), pages(kv="split"), pages("bfloat16"), pages("int8", "group")):
        slots, keys, values = torch.tensor([11, 0, 5]), rows(3), rows(3)
        assert not scatter(mine, slots, keys, values).any()
        read, also = torch.empty(3, 2, 16), torch.empty(3, 2, 16)
        assert not gather(mine, slots, read, also).any()
        torch.testing.assert_close(read, keys, rtol=0.01, atol=0.02)
        torch.testing.assert_close(also, values, rtol=0.01, atol=0.02)


def test_keys_turned_later_are_keys_turned_at_once():
    rope = Rope.of(64, 16)
    for by in (0, 9, -9):
        mine, theirs = pages(), pages()
        slots, keys, values = torch.arange(6), rows(6), rows(6)
        at = torch.arange(10, 16)
        recompute(mine, slots, keys, values, positions=at, rope=rope)
        rerotate(mine, slots, torch.full((6,), by), rope)
        recompute(theirs, slots, keys, values, positions=at + by, rope=rope)
        for one, other in zip(mine.planes, theirs.planes, strict=True):
            torch.testing.assert_close(one.cells, other.cells, rtol=1e-5, atol=1e-5)


def test_deviation_is_the_squared_distance_of_each_token():
    mine, slots = pages(), torch.tensor([3, 7])
    scatter(mine, slots, rows(), rows())
    stood = [plane.cells.reshape(12, 2, 16)[slots].clone() for plane in mine.planes]
    keys, values = rows(), rows()
    said = recompute(mine, slots, keys, values, deviation=True)
    for plane, (fresh, old) in enumerate(zip((keys, values), stood, strict=True)):
        wanted = (fresh.double() - old.double()).square().sum(dim=(1, 2)).float()
        torch.testing.assert_close(said.deviation[plane], wanted)
    assert recompute(mine, slots, keys, values).deviation is None


def test_latent_rows_turn_at_their_end():
    layout = Layout(dtype="bfloat16", latent=True)
    memory = [torch.zeros(2 * 4 * 576 * 2, dtype=torch.uint8)]
    mine = Pages.of(memory, layout, blocks=2, block_tokens=4, heads=1, head_dim=576)
    rope = Rope.of(32, 64, first=512, neighbours=True)
    fresh = torch.randn(3, 1, 576).bfloat16()
    recompute(mine, torch.arange(3), fresh, positions=torch.tensor([0, 5, 31]), rope=rope)
    cells = mine.planes[0].cells.view(8, 576)
    assert torch.equal(cells[:3, :512], fresh[:, 0, :512])
    assert torch.equal(cells[0], fresh[0, 0])
    x, y = fresh[1, 0, 512::2].float(), fresh[1, 0, 513::2].float()
    torch.testing.assert_close(cells[1, 512::2], (x * rope.cos[5] - y * rope.sin[5]).bfloat16())


@given(st.permutations(["block", "layer", "kv", "token", "head"]), st.booleans(), st.data())
def test_pages_lie_where_the_layout_says(order, split, data):
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


REFUSED = {
    "a slot that is not there": (
        lambda: scatter(pages(), torch.tensor([0, 12]), rows(), rows()),
        r"slots\[1\] is 12, 0 to 11 wanted",
    ),
    "a negative slot": (
        lambda: gather(pages(), torch.tensor([-1, 0]), rows(), rows()),
        r"slots\[0\] is -1",
    ),
    "a slot twice": (
        lambda: scatter(pages(), torch.tensor([5, 5]), rows(), rows()),
        "slots name 5 twice",
    ),
    "slots of another count": (
        lambda: scatter(pages(), torch.tensor([5]), rows(), rows()),
        r"rows are \(1, 2, 16\)",
    ),
    "slots that are no integers": (
        lambda: scatter(pages(), torch.tensor([1.0, 2.0]), rows(), rows()),
        "slots are 2 integers, not torch.float32",
    ),
    "no values": (
        lambda: scatter(pages(), torch.tensor([0, 1]), rows()),
        "1 tensors of rows for pages of 2 planes",
    ),
    "quantised rows": (
        lambda: scatter(pages(), torch.tensor([0, 1]), rows(dtype=torch.int8), rows()),
        "not torch.int8",
    ),
    "a head that is no multiple": (
        lambda: scatter(
            Pages((Plane(torch.zeros(1, 4, 2, 12)),)), torch.tensor([0]), torch.zeros(1, 2, 12)
        ),
        "a head of 12 numbers is no multiple of 8",
    ),
    "a token too wide": (
        lambda: scatter(
            Pages((Plane(torch.zeros(1, 1, 64, 256)),)), torch.tensor([0]), torch.zeros(1, 64, 256)
        ),
        "takes 2048 threads of 8 numbers, at most 1024",
    ),
    "rows out of line": (
        lambda: scatter(
            Pages((Plane(torch.zeros(1, 4, 2, 16)),)),
            torch.tensor([0]),
            torch.zeros(40)[1:33].view(1, 2, 16),
        ),
        "heads in rows start at multiples of 16 bytes",
    ),
    "numbers apart": (
        lambda: scatter(
            Pages((Plane(torch.zeros(1, 4, 16, 2).mT),)), torch.tensor([0]), torch.zeros(1, 2, 16)
        ),
        "adjacent in cells",
    ),
    "codes without scales": (
        lambda: scatter(
            Pages((Plane(torch.zeros(1, 4, 2, 16, dtype=torch.int8)),)),
            torch.tensor([0]),
            torch.zeros(1, 2, 16),
        ),
        "do not go together",
    ),
    "scales of another shape": (
        lambda: scatter(
            Pages((Plane(torch.zeros(1, 4, 2, 16, dtype=torch.int8), torch.ones(2)),), "head"),
            torch.tensor([0]),
            torch.zeros(1, 2, 16),
        ),
        r"float32 \(1, 4, 2\) here, not torch.float32 \(2,\)",
    ),
    "a position beyond the tables": (
        lambda: recompute(
            pages(),
            torch.tensor([0, 1]),
            rows(),
            rows(),
            positions=torch.tensor([3, 4]),
            rope=Rope.of(4, 16),
        ),
        r"positions\[1\] is 4, 0 to 3 wanted",
    ),
    "positions without tables": (
        lambda: recompute(pages(), torch.tensor([0, 1]), rows(), rows(), positions=torch.zeros(2)),
        "come together or not at all",
    ),
    "a delta beyond the tables": (
        lambda: rerotate(pages(), torch.tensor([0]), torch.tensor([-4]), Rope.of(4, 16)),
        r"deltas\[0\] is -4, -3 to 3 wanted",
    ),
    "a part in the middle": (
        lambda: rerotate(pages(), torch.tensor([0]), torch.tensor([1]), Rope.of(4, 8, first=4)),
        "numbers 4 to 12 of a head of 16 cannot turn",
    ),
    "keys without rotation": (
        lambda: rerotate(pages(rope="plain"), torch.tensor([0]), torch.tensor([1]), Rope.of(4, 16)),
        "stored unrotated",
    ),
    "an odd table": (lambda: Rope.of(4, 15), "4 positions of 15 numbers"),
    "tables of two shapes": (
        lambda: Rope(torch.ones(2, 4), torch.ones(2, 8)),
        r"cos is \(2, 4\) on cpu, sin \(2, 8\)",
    ),
    "a pool too small": (
        lambda: Pages.of([torch.zeros(64, dtype=torch.uint8)], Layout(), **SIZES),
        "the layer ends at byte 2560 of a pool of 64 bytes",
    ),
    "a layer that is not there": (
        lambda: Pages.of([], Layout(), **SIZES, layers=2, layer=2),
        "layer 2 of 2",
    ),
    "scales missing": (
        lambda: Pages.of(
            [torch.zeros(4096, dtype=torch.uint8)], Layout(dtype="int8", scales="head"), **SIZES
        ),
        "scales by 'head': 0 tensors given for 2 planes",
    ),
    "padding without one piece": (
        lambda: Pages.of(
            [torch.zeros(4096, dtype=torch.uint8)],
            Layout(order=("kv", "block", "layer", "token", "head", "dim"), alignment=64),
            **SIZES,
        ),
        "needs strides",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_kernels_cannot_serve_is_refused(what):
    call, message = REFUSED[what]
    with pytest.raises(ConfigError, match=message):
        call()


def test_planes_are_looked_at_for_each_format_and_not_kept():
    layout = Layout(dtype="bfloat16")
    memory = [torch.zeros(3 * size, dtype=torch.uint8) for size in layout.planes(4, 2, 8)]
    mine = Pages.of(memory, layout, **{**SIZES, "head_dim": 8})
    slots, narrow, wide = torch.tensor([1, 2]), torch.randn(2, 2, 8), torch.randn(2, 2, 8).half()
    for _ in range(2):
        assert not scatter(mine, slots, narrow, narrow).any()  # in steps of 4 numbers
        with pytest.raises(ConfigError, match="a head of 8 numbers is no multiple of 16"):
            scatter(mine, slots, wide, wide)
    cells = weakref.ref(mine.planes[0].cells)
    del mine
    assert cells() is None


def test_a_refused_call_has_written_nothing():
    mine = pages()
    with pytest.raises(ConfigError):
        scatter(mine, torch.tensor([0, 12]), rows(), rows())
    with pytest.raises(ConfigError):
        scatter(mine, torch.tensor([0, 1]), rows(), rows(3))
    assert not any(plane.cells.any() for plane in mine.planes)


def test_no_tokens_are_no_work():
    empty = torch.empty(0, 2, 16)
    none = torch.empty(0, dtype=torch.int64)
    assert gather(pages(), none, empty, empty).shape == (0,)
    assert recompute(pages(), none, empty, empty, deviation=True).deviation.shape == (2, 0)
