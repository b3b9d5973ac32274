"""Verbs on the CPU, over pages in any layout."""

from __future__ import annotations

import torch
from small_pages import pages, rows

from kvtrie.kernels import Pages, Rope, gather, recompute, rerotate, scatter
from kvtrie.model.layout import Layout


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


def test_no_tokens_are_no_work():
    empty = torch.empty(0, 2, 16)
    none = torch.empty(0, dtype=torch.int64)
    assert gather(pages(), none, empty, empty).shape == (0,)
    assert recompute(pages(), none, empty, empty, deviation=True).deviation.shape == (2, 0)
