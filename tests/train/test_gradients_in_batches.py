"""Batches: checkpoints are loaded ahead, memory does not grow, and an error leaves no trace."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from masked import drawn, grads, make, worst

from kvtrie.selective import CacheSettings
from kvtrie.train import GradientSettings, LongContextGradients, make_head
from kvtrie.train.gradients import _Batch


def test_a_cell_computes_while_its_neighbours_checkpoints_come():
    model = make()
    tool = LongContextGradients(
        model, make_head("next_token_prediction", model), CacheSettings("h2o-default", 14, 5)
    )
    ids = drawn(3, total=60)
    calls = []

    def noted(name):
        real = getattr(_Batch, name)

        def note(batch, layers, *more):
            column = next(each for each in more if isinstance(each, range))
            calls.append((name, layers.start, column.start))
            return real(batch, layers, *more)

        return note

    def run_cell(batch, layers, cells, column, seeds, real=_Batch._run_cell):
        calls.append(("_run_cell", layers.start, column.start))
        return real(batch, layers, cells, column, seeds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Batch, "_bring", noted("_bring"))
        patch.setattr(_Batch, "_run_cell", run_cell)
        tool.gradients(ids, ids[:, -20:])
    cells = [(layer, at) for name, layer, at in calls if name == "_run_cell"]
    assert len(cells) > 6
    for cell, following in itertools.pairwise(cells):
        if cell[0] == following[0]:  # the one to the left is asked for before this one runs
            assert ("_bring", *following) in calls[: calls.index(("_run_cell", *cell))]


def test_memory_stays_that_of_a_batch():
    model = make()
    cache = CacheSettings("h2o-default", 14, 5, randomize_chunk_sizes=True)
    tool = LongContextGradients(model, make_head("next_token_prediction", model), cache)
    sizes, draw = [], random.Random(0)
    for _ in range(8):
        ids = drawn(3, total=draw.randint(50, 60))
        tool.gradients(ids, ids[:, -20:])
        sizes.append(tool.pool(torch.device("cpu")).nbytes)
    assert max(sizes) < 2 * min(sizes)


def test_an_error_in_a_batch_leaves_the_next_one_in_order():
    model = make()
    tool = LongContextGradients(
        model, make_head("next_token_prediction", model), CacheSettings("h2o-default", 14, 5),
        GradientSettings(1, 1.0),
    )  # fmt: skip
    ids = drawn(3, total=60)
    tool.gradients(ids, ids[:, -20:])
    truth = grads(model)
    real, calls = _Batch._run_cell, []

    def fails(*given_):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*given_)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Batch, "_run_cell", fails)
        with pytest.raises(KeyboardInterrupt):
            tool.gradients(ids, ids[:, -20:])
    grads(model)
    tool.gradients(ids, ids[:, -20:])
    assert worst(grads(model), truth) == 0.0
