"""Gradients by cells of models with windows compared with torch's own, and runs of such models."""

from __future__ import annotations

import math

import pytest
import torch
from masked import WINDOWED, compare, drawn, drawn_settings, grads, make, ran, worst
from tests.selective.sight import weighed
from tuning import run, words

from kvtrie.kernels import Terms, attend, attend_backward
from kvtrie.selective import CacheSettings
from kvtrie.train import GradientSettings, LongContextGradients, Recall, finetune, make_head
from kvtrie.train.plan import figures

CLOSE = 3e-5


@pytest.fixture(scope="module", params=WINDOWED)
def model(request):
    return make(request.param)


@pytest.mark.grid
@pytest.mark.parametrize(
    ("tiles", "padded"),
    [
        ((1, 0.5), False),
        ((2, 1.0), True),
        pytest.param((3, 2.0), True, marks=pytest.mark.deep),
        pytest.param((1, 1e3), False, marks=pytest.mark.deep),
    ],
)
def test_gradients_are_those_of_autograd(model, tiles, padded):
    settings = drawn_settings("h2o-default", 7, grace_period=3)
    assert compare(model, settings, 7, GradientSettings(*tiles), padded=padded) < CLOSE


@pytest.mark.deep
@pytest.mark.parametrize("policy", ["lastrec", "keydiff", "snapkv"])
def test_gradients_of_other_policies_are_those_of_autograd(model, policy):
    settings = drawn_settings(f"{policy}-default", 4)
    assert compare(model, settings, 4, GradientSettings(2, 1.0), width=9) < CLOSE


def test_with_every_row_kept_gradients_are_the_models_own(model):
    ids, targets = drawn(1), drawn(2)
    logits = model(ids).logits
    truth = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    truth.backward()
    expected = grads(model)
    settings = CacheSettings("h2o-default", 60, 13)
    head = make_head("next_token_prediction", model)
    tool = LongContextGradients(model, head, settings, GradientSettings(1, 0.3))
    assert abs(tool.gradients(ids, targets) - truth) < 1e-5
    assert worst(grads(model), expected) < CLOSE


def test_cells_do_not_change_gradients_of_windows(model):
    settings = CacheSettings("h2o-default", 14, 5)
    _, whole, _ = ran(model, settings, GradientSettings(3, 1000))
    for tiles in ((1, 0.4), (2, 1.5)):
        assert worst(ran(model, settings, GradientSettings(*tiles))[1], whole) < 1e-5


@pytest.mark.parametrize(
    ("kind", "mode"),
    [("gemma3", "finetune_long_lora"), ("mistral with windows", "finetune_offload_full")],
)
def test_a_model_with_windows_is_tuned(tmp_path, kind, mode):
    data = Recall(cases=8, words=60, facts=3)
    found = finetune(make(kind), data, run(tmp_path, mode), tokens=words)
    assert found.steps == 3
    assert all(map(math.isfinite, found.losses))


def test_a_plan_counts_the_rows_of_windows(tmp_path):
    given = {"kv_cache": CacheSettings("h2o-default", 32, 8), "grad": GradientSettings(3, 1.0)}
    small, large = (figures(make(kind), run(tmp_path, **given), 80) for kind in ("gemma3", "qwen3"))
    assert small.steps == large.steps
    assert small.buffers < large.buffers
    assert small.starts < large.starts
    # Two windows of 9 rows and a layer of 32, two heads of 16 numbers, K and V in both formats.
    rows = (2 * 9 + 32) * 2
    assert small.buffers == 2 * rows * (2 * 16 * (4 + 4) + 4)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("sinks", [None, 4])
def test_the_backward_pass_knows_what_models_add_to_attention(softcap, sinks):
    torch.manual_seed(0)
    query, keys, values = (
        torch.randn(2, heads, rows, 8, requires_grad=True)
        for heads, rows in ((4, 5), (2, 9), (2, 9))
    )
    bias = torch.randn(4, requires_grad=True) if sinks else None
    first = torch.tensor([0, 2])
    given = {
        "token_pos": torch.arange(9).expand(2, 2, 9),
        "input_pos": 4,
        "first": first,
        "terms": Terms(softcap, bias),
    }
    at = torch.arange(9)
    seen = (at <= torch.arange(4, 9)[:, None]) & (at >= first[:, None, None, None])
    spread = [each.repeat_interleave(2, dim=1) for each in (keys, values)]
    weights = weighed(query @ spread[0].mT * 8**-0.5, seen, softcap, bias)
    truth = weights @ spread[1]
    grad = torch.randn_like(truth)
    truth.backward(grad)
    mine = [torch.zeros_like(keys), torch.zeros_like(values), torch.zeros(4)]
    with torch.no_grad():
        out, summed = attend(query, keys, values, return_attn_weights=True, **given)
        queries = attend_backward(
            grad, query, keys, values, mine[0], mine[1], sink_grads=mine[2], **given
        )
    assert (out - truth).abs().max() < 1e-5
    assert (summed - weights.sum(dim=2)).abs().max() < 1e-5
    for found, tensor in zip((queries, *mine), (query, keys, values, bias), strict=True):
        expected = torch.zeros(4) if tensor is None else tensor.grad
        assert (found - expected).abs().max() < 1e-5
