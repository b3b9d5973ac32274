"""Settings of runs: combinations that are refused."""

from __future__ import annotations

import pytest
import torch
from tuning import tuned

from kvtrie.errors import ConfigError
from kvtrie.train import (
    EvalSettings,
    LoraSettings,
    OptimizerSettings,
    TrainSettings,
)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"train": TrainSettings(micro_batch_size=4, global_batch_size=6)}, "6 is no multiple"),
        ({"mode": "finetune_offload_lora", "devices": 2}, "devices is 2"),
        ({"head_model": "x"}, "head_model is one of"),
        ({"verbose": "loud"}, "verbose is one of"),
        ({"record_gpu_memory_kind": 4}, "record_gpu_memory_kind is 4"),
        ({"devices": 2}, "devices is 2, and 1 processes"),
        ({"record_gpu_memory_snapshots": 9}, "no CUDA device"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="a device is there")
def test_runs_that_cannot_be(tmp_path, given, message):
    with pytest.raises(ConfigError, match=message):
        tuned(tmp_path, **{"mode": "finetune_long_lora"} | given)


def test_settings_of_runs_that_cannot_be():
    for kind, given, message in (
        (TrainSettings, {"epochs": 0}, "train.epochs is 0"),
        (EvalSettings, {"interval": 0}, "eval.interval is 0"),
        (LoraSettings, {"query": False, "value": False}, "LoRA without a map"),
        (LoraSettings, {"r": 0}, "lora.r is 0"),
        (OptimizerSettings, {"name": "Lion"}, "optimizer is one of"),
        (OptimizerSettings, {"adam_betas": (0.9,)}, "two numbers"),
        (OptimizerSettings, {"momentum": 0.9}, "AdamW has no argument momentum"),
        (OptimizerSettings, {"name": "SGD", "eps": 1e-8}, "SGD has no argument eps"),
        (OptimizerSettings, {"name": "Adam", "rmsprop_alpha": 0.9}, "no argument rmsprop_alpha"),
    ):
        with pytest.raises(ConfigError, match=message):
            kind(**given)
