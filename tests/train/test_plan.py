"""The plan of a run: bytes of its checkpoints."""

from __future__ import annotations

from masked import drawn, grads, make

from kvtrie.selective import CacheSettings
from kvtrie.train import (
    GradientSettings,
    LongContextGradients,
    Run,
    TrainSettings,
    make_head,
)
from kvtrie.train.plan import figures


def test_a_plan_says_what_checkpoints_take():
    model, ids = make(), drawn(3, size=2, total=100)
    for grad in (
        GradientSettings(),
        GradientSettings(2, 0.5),
        GradientSettings(1, 1.0, "torch-quantized8", "torch-quantized4"),
    ):
        cache = CacheSettings("h2o-default", 24, 6)
        tool = LongContextGradients(model, make_head("next_token_prediction", model), cache, grad)
        for width in (1, 40):
            tool.gradients(ids, ids[:, -width:])
            grads(model)
            made = Run(out_dir="x", kv_cache=cache, grad=grad, train=TrainSettings(2))
            assert figures(model, made, 100, targets=width).checkpoints == tool.checkpoint_bytes
