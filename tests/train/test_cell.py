"""Cells: defects of their gradients are seen, and rows return to those of a cell's start."""

from __future__ import annotations

import pytest
import torch
from masked import compare, drawn, grads, make, ran

from kvtrie.selective import CacheSettings
from kvtrie.train import GradientSettings, LongContextGradients, make_head
from kvtrie.train.cell import CellCache


@pytest.fixture(scope="module")
def llama():
    return make()


def test_the_graph_holds_no_tensor_of_all_rows(llama):
    rows, seen = 20, []
    settings = CacheSettings("h2o-default", rows, 4, cache_kwargs={"grace_period": 3})
    tool = LongContextGradients(
        llama, make_head("next_token_prediction", llama), settings, GradientSettings(3, 1.0)
    )
    ids = drawn(3, total=61)  # 20, then steps of 4 in cells of 20, and 1
    at = []
    begin = CellCache.begin

    def noted(cell, start):
        at.append(0 if start is None else start.input_pos)
        return begin(cell, start)

    def pack(x):
        if at and at[-1]:  # the prefill is the one cell that starts at 0
            seen.append(tuple(x.shape))
        return x

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CellCache, "begin", noted)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            tool.gradients(ids, ids)
    grads(llama)
    assert len(seen) > 100
    assert not [shape for shape in seen if rows in shape]
    assert any(4 in shape for shape in seen)


def wrong(model, monkeypatch, defect):
    settings = CacheSettings("h2o-default", 14, 5, cache_kwargs={"grace_period": 3})
    monkeypatch.setattr(*defect)
    return compare(model, settings, 11, GradientSettings(1, 1.0))


def test_gradients_of_evicted_rows_are_not_kept(llama, monkeypatch):
    undo_step = CellCache.undo_step

    def kept(cell, new, undo):
        before = [plane.clone() for plane in cell.grads]
        found = undo_step(cell, new, undo)
        for plane, old in zip(cell.grads, before, strict=True):
            lost = (plane == 0) & (old != 0)
            if undo:
                plane[lost] = old[lost]
        return found

    assert wrong(llama, monkeypatch, (CellCache, "undo_step", kept)) > 1e-3


def test_what_left_the_ring_takes_its_gradient_along(llama, monkeypatch):
    undo_step = CellCache.undo_step

    def kept(cell, new, undo):
        base = cell.place.shape[2] - cell.grace
        before = [plane[:, :, base:].clone() for plane in cell.grads]
        found = undo_step(cell, new, undo)
        if undo:
            for plane, old in zip(cell.grads, before, strict=True):
                plane[:, :, base:] = old
        return found

    assert wrong(llama, monkeypatch, (CellCache, "undo_step", kept)) > 1e-3


def test_a_cell_is_seeded_once(llama, monkeypatch):
    begin = CellCache.differentiate

    def twice(cell):
        begin(cell)
        for plane in cell.grads:
            plane.mul_(2)

    assert wrong(llama, monkeypatch, (CellCache, "differentiate", twice)) > 1e-3


def test_rows_are_those_of_the_start_behind_a_cell(llama, monkeypatch):
    begin, ends = CellCache.begin, []
    starts = []

    def noted(cell, start):
        if starts and starts[-1][0] is cell:
            ends.append((starts[-1][1], cell.start()))
        begin(cell, start)
        starts.append((cell, cell.start()))

    monkeypatch.setattr(CellCache, "begin", noted)
    settings = CacheSettings("h2o-torch-quantized8", 14, 5, cache_kwargs={"grace_period": 3})
    ran(llama, settings, GradientSettings(1, 1.0))
    assert len(ends) > 5
    for start, end in ends:
        assert start[3:] == end[3:]
        assert all(torch.equal(*pair) for pair in zip(start[:3], end[:3], strict=True))
