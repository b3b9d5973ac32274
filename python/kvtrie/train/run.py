"""Run: all that a fine-tuning run is asked to be.

Invariant: what cannot be is refused before anything runs. Cost: none.
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
"""Modes: adapters or all weights, computed where they are or copied to a device part by part."""

_MOST = 2**31 - 1
_VERBOSE = ("none", "some", "more", "all")


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """Steps of an optimiser.

    Attributes:
        micro_batch_size: sequences of one pass.
        global_batch_size: sequences of one optimiser step over all devices, a multiple of micro
            times devices; None is that product itself.
        epochs: passes over the data.
        max_steps: optimiser steps after which the run ends; None sets no limit.
        max_time: seconds after which the run ends; None sets no limit.
        save_interval: optimiser steps between checkpoints.
        log_interval: optimiser steps between lines.
        max_tokens: the run ends after the step in which this number of tokens was read; None sets
            no limit.
        max_norm: gradients of a step are scaled down to this norm; None leaves them.
        min_lr: the learning rate that the cosine ends at.
        lr_warmup_steps: steps over which the learning rate rises, at most half of all.
        lr_warmup_fraction: the same as a share of all steps; None takes `lr_warmup_steps`.
        tie_embeddings: let the map to logits be the embedding; None leaves it as it is.

    Raises:
        ConfigError: a number that cannot be.
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
        initial_validation: whether one comes first; else two cases are run to see that it works.
        final_validation: whether one comes last.
        micro_batch_size: sequences of one pass; None takes that of training.
        max_iters: most passes of one validation.
        max_new_tokens: tokens of an answer to the first case of validation, which is written after
            each validation; 0 writes none.

    Raises:
        ConfigError: a number that cannot be.
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
        out_dir: the folder that metrics, plots and checkpoints go to.
        mode: one of `MODES`.
        head_model: a head's name; see `make_head`.
        kv_cache: the cache that the model learns under.
        grad: cells and checkpoints.
        train: steps.
        eval: validation.
        lora: adapters, in the modes that have them.
        optimizer: of the weights that are trained.
        devices: processes that share a batch; 1 in the offload modes.
        device: where offload modes compute.
        verbose: how much is written: "none", "some", "more" or "all".
        seed: of order, dropout and fresh weights.
        resume: go on from the last checkpoint in `out_dir`.
        yarn_rope: as of `SelectiveCache`.
        attention_forward_temp_size_gb: bound of attention's temporary arrays.
        attention_backward_temp_size_gb: the same backwards.
        record_gpu_memory_snapshots: entries of a memory snapshot; 0 records none.
        record_gpu_memory_kind: 0 each part of each step, 1 rows of cells, 2 the first step alone,
            3 one file per step.

    Raises:
        ConfigError: a number that cannot be, or settings that do not go together.
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
        """Whether adapters are trained, instead of all weights."""
        return self.mode.endswith("lora")

    @property
    def global_batch_size(self) -> int:
        """Sequences of one optimiser step."""
        given = self.train.global_batch_size
        return self.train.micro_batch_size * self.devices if given is None else given
