"""Short fine-tuning runs of a tiny model."""

from __future__ import annotations

from masked import make

from kvtrie.selective import CacheSettings
from kvtrie.train import (
    EvalSettings,
    OptimizerSettings,
    Recall,
    Run,
    TrainSettings,
    finetune,
)

CACHE = CacheSettings("h2o-default", 32, 8)


def words(text):
    return [1 + sum(map(ord, word)) % 96 for word in text.split()]


def run(folder, mode="finetune_long_lora", **more):
    given = {
        "kv_cache": CACHE,
        "train": TrainSettings(micro_batch_size=2, max_steps=3, save_interval=2),
        "eval": EvalSettings(final_validation=False),
        "optimizer": OptimizerSettings(learning_rate=1e-2),
    }
    return Run(out_dir=str(folder), mode=mode, **(given | more))


def tuned(folder, mode="finetune_long_lora", seed=0, write=lambda _: None, **more):
    data = Recall(cases=14, words=60, facts=3)
    return finetune(make(seed=seed), data, run(folder, mode, **more), tokens=words, write=write)
