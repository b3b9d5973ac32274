"""Run: the settings of a fine-tuning run.

Invariant: invalid settings are refused on creation. Cost: none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from kvtrie.errors import ConfigError
from kvtrie.selective.settings import CacheSettings
from kvtrie.settings.argument import flag, folder, put, real, text, whole, word
from kvtrie.train.head import HEADS
from kvtrie.train.lora import LoraSettings
from kvtrie.train.optimisers import OptimizerSettings
from kvtrie.train.settings import GradientSettings

__all__ = ["MODES", "EvalSettings", "Run", "TrainSettings"]

MODES = (
    "finetune_long_lora",
    "finetune_long_full",
    "finetune_offload_lora",
    "finetune_offload_full",
)
"""Modes: training of adapters or all weights, in place or copied to a device part by part."""

_MOST = 2**31 - 1
_VERBOSE = ("none", "some", "more", "all")


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """Steps of an optimiser.

    Attributes:
        micro_batch_size: sequences per pass.
        global_batch_size: sequences per optimiser step over all devices, a multiple of
            `micro_batch_size` times devices. None takes this product.
        epochs: passes over the data.
        max_steps: largest number of optimiser steps. None sets no limit.
        max_time: largest time of the run in seconds. None sets no limit.
        save_interval: optimiser steps between checkpoints.
        log_interval: optimiser steps between lines.
        max_tokens: the run ends after reading this number of tokens, at the end of the step. None
            sets no limit.
        max_norm: largest norm of a step's gradients. None does not scale them.
        min_lr: final learning rate of the cosine.
        lr_warmup_steps: steps with a rising learning rate, at most half of all.
        lr_warmup_fraction: the same as a share of all steps. None takes `lr_warmup_steps`.
        tie_embeddings: share the weights of the embedding with the map to logits. None keeps the
            model's setting.

    Raises:
        ConfigError: a number out of range.
    """

    micro_batch_size: int = 4
    global_batch_size: int | None = None
    epochs: int = 1
    max_steps: int | None = None
    max_time: float | None = None
    max_tokens: int | None = None
    max_norm: float | None = None
    min_lr: float = 0.0
    save_interval: int = 1000
    log_interval: int = 1
    lr_warmup_steps: int = 100
    lr_warmup_fraction: float | None = None
    tie_embeddings: bool | None = None

    def __post_init__(self) -> None:
        for name, low in (
            ("micro_batch_size", 1),
            ("epochs", 1),
            ("save_interval", 1),
            ("log_interval", 1),
            ("lr_warmup_steps", 0),
        ):
            put(self, **{name: whole(f"train.{name}", getattr(self, name), low, _MOST)})
        for name in ("global_batch_size", "max_steps", "max_tokens"):
            if getattr(self, name) is not None:
                most = 2**63 - 1 if name == "max_tokens" else _MOST
                put(self, **{name: whole(f"train.{name}", getattr(self, name), 1, most)})
        if self.max_norm is not None:
            put(self, max_norm=real("train.max_norm", self.max_norm, 1e-9, math.inf))
        put(self, min_lr=real("train.min_lr", self.min_lr, 0, math.inf))
        if self.max_time is not None:
            put(self, max_time=real("train.max_time", self.max_time, 0, math.inf))
        if self.lr_warmup_fraction is not None:
            share = real("train.lr_warmup_fraction", self.lr_warmup_fraction, 0, 1)
            put(self, lr_warmup_fraction=share)
        if self.tie_embeddings is not None:
            put(self, tie_embeddings=flag("train.tie_embeddings", self.tie_embeddings))


@dataclass(frozen=True, slots=True)
class EvalSettings:
    """Validation.

    Attributes:
        interval: optimiser steps between validations.
        initial_validation: validate before the first step. Otherwise only two cases run as a test.
        final_validation: validate after the last step.
        micro_batch_size: sequences per pass. None takes the training setting.
        max_iters: most passes of a validation.
        max_new_tokens: largest number of tokens of an answer to the first validation case, reported
            after each validation. 0 reports no answer.

    Raises:
        ConfigError: a number out of range.
    """

    interval: int = 100
    initial_validation: bool = False
    final_validation: bool = True
    micro_batch_size: int | None = None
    max_iters: int = 100
    max_new_tokens: int = 0

    def __post_init__(self) -> None:
        put(
            self,
            interval=whole("eval.interval", self.interval, 1, _MOST),
            initial_validation=flag("eval.initial_validation", self.initial_validation),
            final_validation=flag("eval.final_validation", self.final_validation),
            max_iters=whole("eval.max_iters", self.max_iters, 1, _MOST),
            max_new_tokens=whole("eval.max_new_tokens", self.max_new_tokens, 0, _MOST),
        )
        if self.micro_batch_size is not None:
            size = whole("eval.micro_batch_size", self.micro_batch_size, 1, _MOST)
            put(self, micro_batch_size=size)


@dataclass(frozen=True, slots=True)
class Run:
    """A fine-tuning run.

    Attributes:
        out_dir: folder for metrics, plots and checkpoints.
        mode: one of `MODES`.
        head_model: a head's name, see `make_head`.
        kv_cache: the cache used in training.
        grad: cells and checkpoints.
        train: steps.
        eval: validation.
        lora: adapters, in the modes with adapters.
        optimizer: optimiser of the trained weights.
        devices: number of processes per batch, 1 in the offload modes.
        device: computing device of offload modes.
        verbose: level of the report: "none", "some", "more" or "all".
        seed: seed of order, dropout and new weights.
        resume: resume from the last checkpoint in `out_dir`.
        yarn_rope: see `SelectiveCache`.
        attention_forward_temp_size_gb: bound of attention's temporary arrays, in 10^9 bytes.
        attention_backward_temp_size_gb: the same in the backward pass.
        record_gpu_memory_snapshots: entries of a memory snapshot. 0 records none.
        record_gpu_memory_kind: 0 for each part of each step, 1 for rows of cells, 2 for parts of
            the first step, 3 for a file per step.

    Raises:
        ConfigError: a number out of range, or contradictory settings.
    """

    out_dir: str
    mode: str = "finetune_long_lora"
    head_model: str = "next_token_prediction"
    kv_cache: CacheSettings = field(default_factory=CacheSettings)
    grad: GradientSettings = field(default_factory=GradientSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    eval: EvalSettings = field(default_factory=EvalSettings)
    lora: LoraSettings = field(default_factory=LoraSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    devices: int = 1
    device: str = "cpu"
    verbose: str = "some"
    seed: int = 0
    resume: bool = False
    yarn_rope: bool = True
    attention_forward_temp_size_gb: float = 3.0
    attention_backward_temp_size_gb: float = 3.0
    record_gpu_memory_snapshots: int = 0
    record_gpu_memory_kind: int = 0

    def __post_init__(self) -> None:
        put(
            self,
            out_dir=folder("out_dir", self.out_dir),
            mode=word("mode", self.mode, MODES),
            head_model=word("head_model", self.head_model, HEADS),
            devices=whole("devices", self.devices, 1, 65_535),
            device=text("device", self.device),
            verbose=word("verbose", self.verbose, _VERBOSE),
            seed=whole("seed", self.seed, 0, _MOST),
            resume=flag("resume", self.resume),
            yarn_rope=flag("yarn_rope", self.yarn_rope),
            record_gpu_memory_snapshots=whole(
                "record_gpu_memory_snapshots", self.record_gpu_memory_snapshots, 0, _MOST
            ),
            record_gpu_memory_kind=whole(
                "record_gpu_memory_kind", self.record_gpu_memory_kind, 0, 3
            ),
        )
        if not self.adapts and self.lora != LoraSettings():
            raise ConfigError(f"{self.mode} trains all weights: settings of lora have no effect")
        if self.offloads and self.devices != 1:
            raise ConfigError(f"{self.mode} runs on one device, devices is {self.devices}")
        if self.eval.max_new_tokens and self.head_model != "next_token_prediction":
            raise ConfigError(
                f"head {self.head_model} answers with a class: eval.max_new_tokens is "
                f"{self.eval.max_new_tokens}, 0 wanted"
            )
        share = self.train.micro_batch_size * self.devices
        if self.global_batch_size % share:
            raise ConfigError(
                f"train.global_batch_size {self.global_batch_size} is no multiple of "
                f"{self.train.micro_batch_size} sequences on {self.devices} devices ({share})"
            )

    @property
    def offloads(self) -> bool:
        """Whether weights stay on the CPU and parts are copied to the device."""
        return "offload" in self.mode

    @property
    def adapts(self) -> bool:
        """Whether adapters are trained instead of all weights."""
        return self.mode.endswith("lora")

    @property
    def global_batch_size(self) -> int:
        """Sequences per optimiser step."""
        given = self.train.global_batch_size
        return self.train.micro_batch_size * self.devices if given is None else given
