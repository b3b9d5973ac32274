"""Checks of pages, rows, slots and tables: each error has its numbers, and nothing is written."""

from __future__ import annotations

import weakref

import pytest
import torch
from small_pages import SIZES, pages, rows

from kvtrie.errors import ConfigError
from kvtrie.kernels import Pages, Plane, Rope, gather, recompute, rerotate, scatter
from kvtrie.model.layout import Layout

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
