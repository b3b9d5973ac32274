"""Finetune: a run from the first step or from a checkpoint to the last step.

Invariant: a step depends only on settings, weights and its number. Files on disk are complete.
Cost: gradients by cells, and an optimiser.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (torch leaves parts untyped)

from __future__ import annotations

import math
import shutil
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvtrie.engines.transformers import fingerprint
from kvtrie.errors import ConfigError
from kvtrie.selective import generate
from kvtrie.train.data import collate
from kvtrie.train.evaluate import Measured, evaluate, random_state
from kvtrie.train.gradients import LongContextGradients
from kvtrie.train.head import make_head
from kvtrie.train.lora import with_lora
from kvtrie.train.metrics import Metrics
from kvtrie.train.optimisers import make_optimizer
from kvtrie.train.parallel import World
from kvtrie.train.residence import Offloaded
from kvtrie.train.saved import About, Saved
from kvtrie.train.snapshots import Snapshots
from kvtrie.train.steps import Steps

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transformers import PreTrainedModel

    from kvtrie.train.data import DataModule
    from kvtrie.train.run import Run

__all__ = ["Tuned", "finetune"]

_CHECKED = 2  # cases for a test of validation before the first step


class Tuned:
    """Results of a run.

    Attributes:
        model: model with adapters, or with all weights trained.
        losses: losses of the steps of this call.
        validation: results of the last validation, None without validation.
        steps: total number of optimiser steps.
    """

    def __init__(
        self,
        model: Any,  # noqa: ANN401 - a PeftModel or a PreTrainedModel
        losses: list[float],
        validation: Measured | None,
        steps: int,
    ) -> None:
        self.model = model
        self.losses = losses
        self.validation = validation
        self.steps = steps


def finetune(
    model: PreTrainedModel,
    data: DataModule,
    run: Run,
    *,
    tokens: Callable[[str], list[int]],
    continued: Callable[[str], list[int]] | None = None,
    chat: Callable[[Any, bool], list[int]] | None = None,
    text: Callable[[list[int]], str] | None = None,
    name: str = "",
    write: Callable[[str], Any] = lambda _: None,
) -> Tuned:
    """Fine-tune a model under a cache's policy.

    Args:
        model: see `SelectiveCache`. The modes for all weights change its weights.
        data: source of the cases.
        run: settings.
        tokens: tokenizer of a prompt, as for inference.
        continued: tokenizer without special tokens, for answers and labels. None takes `tokens`.
        chat: tokenizer of messages, see `DataModule.prepare`.
        text: detokenizer for reported answers. None reports the tokens.
        name: the user's name of the model.
        write: called with lines of the report.

    Raises:
        ConfigError: settings, data, model or folder do not match, before the first step, or a loss
            is not finite, with its step.
    """
    with World(run.devices) as world:
        prepare = partial(data.prepare, tokens, continued=continued, chat=chat, name=name)
        return _Tuning(model, data, run, prepare, text, name, write, world).all()


class _Tuning:
    """State of a run."""

    def __init__(  # noqa: PLR0917 - made by `finetune` alone
        self,
        model: PreTrainedModel,
        data: DataModule,
        run: Run,
        prepare: Callable[..., None],
        text: Callable[[list[int]], str] | None,
        name: str,
        write: Callable[[str], Any],
        world: World,
    ) -> None:
        self._run, self._data, self._world, self._text = run, data, world, text
        self._write = write if world.leads and run.verbose != "none" else _say_nothing
        torch.manual_seed(run.seed)
        classes = run.head_model != "next_token_prediction"
        about = _about(model, data, run, name)
        self._saved = Saved(Path(run.out_dir))
        start = _start(self._saved, run, about)
        base: Any = model
        if run.train.tie_embeddings:
            base.config.tie_word_embeddings = True
            base.tie_weights()
        prepare(classes=classes)
        if classes:
            about = replace(about, labels=data.label_tokens())
        if not run.offloads and (run.device != "cpu" or world.device):
            base.to(world.device or run.device)
        self._head = make_head(run.head_model, base, about.labels or None)
        self._model: Any = with_lora(base, run.lora) if run.adapts else base
        self._prepare_weights()
        self._optimizer = make_optimizer(self._trained(), run.optimizer)
        self._rates = _rates(run, self._optimizer)
        _room(self._saved.folder, self._trained())
        self._snapshots = Snapshots(
            self._saved.folder, run.record_gpu_memory_snapshots, run.record_gpu_memory_kind
        )
        self._tool = LongContextGradients(
            self._model,
            self._head,
            run.kv_cache,
            run.grad,
            yarn_rope=run.yarn_rope,
            attention_forward_temp_size_gb=run.attention_forward_temp_size_gb,
            attention_backward_temp_size_gb=run.attention_backward_temp_size_gb,
            watch=self._snapshots.watch,
        )
        if run.offloads:
            device = torch.device(run.device)
            self._tool.residence = Offloaded(self._tool.decoder, self._head, device)
        self._steps = Steps(run, data)
        self._start = start
        if start:
            self._saved.restore(start, self._model, self._head, self._optimizer)
        elif world.leads:
            self._saved.begin(about)
        world.wait()
        self._metrics = Metrics(self._saved.folder, start) if world.leads else None

    def _prepare_weights(self) -> None:
        """Mark the weights to train: adapters or all weights, without an unused map to logits."""
        if not self._run.adapts:
            for weight in self._model.parameters():
                weight.requires_grad_(True)  # noqa: FBT003 - torch's own
        if not self._head.needs_logits:
            tied = self._model.config.tie_word_embeddings
            for weight in self._model.get_output_embeddings().parameters():
                weight.requires_grad_(tied and not self._run.adapts)

    def _trained(self) -> list[torch.nn.Parameter]:
        every = (*self._model.parameters(), *self._head.parameters())
        return [each for each in every if each.requires_grad]

    # --------------------------------------------------------------------------------- the run

    def all(self) -> Tuned:
        """Run the remaining steps."""
        run, steps = self._run, self._steps
        self._introduce()
        losses: list[float] = []
        measured: Measured | None = None
        if not self._start:
            self._validate(0, only=not run.eval.initial_validation)
        self._model.train()
        began = time.monotonic()
        at = self._start
        while at < steps.total:
            losses.append(self._step(at, began))
            at += 1
            saves = at % run.train.save_interval == 0
            if at % run.eval.interval == 0 and at < steps.total:
                measured = self._validate(at)
            if saves and at < steps.total:
                self._save(at)
            if self._world.sum(float(_over(run.train.max_time, began))):
                break
        if losses or not self._start:
            self._save(at)
        if run.eval.final_validation:
            measured = self._validate(at)
        if self._metrics is not None:
            self._metrics.plot()
            self._write(f"Checkpoint, metrics and plot are in {self._saved.folder}.\n")
        return Tuned(self._model, losses, measured, at)

    def _step(self, at: int, began: float) -> float:
        run, world = self._run, self._world
        random_state(run.seed, at, world.rank)
        self._snapshots.begin(at)
        start = time.monotonic()
        batch, size = self._steps.batch(at), run.train.micro_batch_size
        parts = [batch[lo : lo + size] for lo in range(0, len(batch), size)]
        mine = parts[world.rank :: world.size]
        self._optimizer.zero_grad(set_to_none=True)
        loss, seen = 0.0, 0
        for part in mine:
            made = collate([self._data.case(each) for each in part]).to(self._device)
            found = self._tool.gradients(
                made.input_ids,
                made.targets,
                1 / len(mine),
                attention_mask=made.attention_mask,
            )
            loss, seen = loss + float(found) / len(mine), seen + made.tokens
        loss = world.mean(loss)
        if not math.isfinite(loss):
            raise ConfigError(
                f"the loss of step {at + 1} is {loss}: the run stops, and its last checkpoint "
                f"is of step {max(self._saved.steps(), default=0)}"
            )
        world.average(self._trained())
        if run.train.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._trained(), run.train.max_norm)
        rates = self._rates
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            group["lr"] = self._steps.rate(at, rate)
        self._optimizer.step()
        seen = int(world.sum(seen))
        if self._metrics is not None:
            spent = time.monotonic() - start
            each = (time.monotonic() - began) / (at + 1 - self._start)
            line = self._metrics.step(
                at + 1,
                total=self._steps.total,
                loss=loss,
                rate=self._steps.rate(at, rates[0]),
                tokens_per_second=seen / spent,
                left=each * (self._steps.total - at - 1),
            )
            if (at + 1) % run.train.log_interval == 0:
                self._write(line)
                if run.verbose in {"more", "all"}:
                    self._write(self._details())
        return loss

    def _validate(self, step: int, *, only: bool = False) -> Measured | None:
        """Validate. `only` runs two cases without reporting figures."""
        run, places = self._run, self._data.validation.places
        if not places:
            return None
        size = run.eval.micro_batch_size or run.train.micro_batch_size
        if only:
            places, size = places[:_CHECKED], min(size, _CHECKED)
        found = evaluate(self._tool, self._data, places, size=size, most=run.eval.max_iters)
        if not only and self._metrics is not None:
            self._write(self._metrics.validation(step, found))
        if not only and run.eval.max_new_tokens and self._world.leads:
            self._write(self._answer(places[0]))
        return None if only else found

    def _answer(self, place: int) -> str:
        """Return a line with the model's answer to a case, using the cache's policy."""
        module: Any = self._tool.decoder.model
        ids = torch.tensor([self._data.prompt(place)], device=self._device)
        learned = module.training
        module.eval()
        try:
            made = generate(
                module,
                ids,
                self._run.kv_cache,
                yarn_rope=self._run.yarn_rope,
                attention_forward_temp_size_gb=self._run.attention_forward_temp_size_gb,
                max_new_tokens=self._run.eval.max_new_tokens,
                do_sample=False,
            )
        finally:
            module.train(learned)
        found: list[int] = made[0, ids.shape[1] :].tolist()
        answer = " ".join(map(str, found)) if self._text is None else repr(self._text(found))
        return f"  answer to {self._data.where(place)}: {answer}\n"

    def _save(self, step: int) -> None:
        if self._world.leads:
            self._saved.write(step, self._model, self._head, self._optimizer)
        self._world.wait()

    def _details(self) -> str:
        """Return a line about the last pass: its steps and the bytes of its checkpoints."""
        steps = self._tool.logs[0].steps
        shown = f" of {', '.join(map(str, steps))}" if self._run.verbose == "all" else ""
        size = self._tool.checkpoint_bytes / 1e6
        return f"  {sum(steps)} tokens in {len(steps)} steps{shown}; checkpoints {size:.1f} MB\n"

    @property
    def _device(self) -> torch.device:
        return next(self._model.parameters()).device

    def _introduce(self) -> None:
        run, data = self._run, self._data
        trained = sum(each.numel() for each in self._trained())
        every = sum(each.numel() for each in self._model.parameters())
        rows = (
            ("mode", run.mode),
            ("weights trained", f"{trained:,} of {every:,}"),
            ("head model", run.head_model),
            ("cache", f"{run.kv_cache.name}, {run.kv_cache.cache_length} rows"),
            ("steps of", f"{run.kv_cache.chunk_size} tokens"),
            ("cells", f"{run.grad.layers_per_cell} layers, {_times(run)} rows"),
            ("batch", f"{run.train.micro_batch_size} of {run.global_batch_size}"),
            ("optimizer", f"{run.optimizer.name}, rate {self._rates[0]:g}"),
            ("cases", f"{len(data.train.places)} to train, {len(data.validation.places)} to hold"),
            ("steps", f"{self._start} to {self._steps.total}"),
        )
        for name, text in rows:
            self._write(f"{name:>16}  {text}\n")


def _times(run: Run) -> str:
    return f"{run.grad.chunks_per_cell_multiplier:g} x"


def _say_nothing(_: str) -> None:
    """Write nothing."""


def _path(kind: type) -> str:
    """Return the name of a class for the command line."""
    main = kind.__module__ == "__main__"  # the reading process has a different main module
    return kind.__name__ if main else f"{kind.__module__}.{kind.__qualname__}"


def _over(most: float | None, began: float) -> bool:
    return most is not None and time.monotonic() - began >= most


def _about(model: PreTrainedModel, data: DataModule, run: Run, name: str) -> About:
    given = {"class_path": _path(type(data)), "init_args": dict(data.given)}
    cache, rope = asdict(run.kv_cache), run.yarn_rope
    return About(name, fingerprint(model), run.mode, run.head_model, [], cache, rope, given)


def _rates(run: Run, optimizer: torch.optim.Optimizer) -> list[float]:
    """Return the learning rate of each group of weights.

    Raises:
        ConfigError: the lowest rate of the schedule is above the rate of a group.
    """
    rates: list[float] = [group["lr"] for group in optimizer.param_groups]
    if run.train.min_lr > min(rates):
        raise ConfigError(
            f"train.min_lr is {run.train.min_lr:g}, above the learning rate {min(rates):g}"
        )
    return rates


def _start(saved: Saved, run: Run, about: About) -> int:
    """Return the number of steps already done, 0 for a new run.

    Raises:
        ConfigError: the folder has no run to resume, a run of a different model, or checkpoints
            although `resume` is off.
    """
    before = saved.about()
    if before is None:
        if run.resume:
            raise ConfigError(f"{saved.folder} holds no run that could go on")
        return 0
    steps = saved.steps()
    if not run.resume:
        if steps:
            raise ConfigError(
                f"{saved.folder} holds a run of {steps[-1]} steps: --resume True goes on, or name "
                "another out_dir"
            )
        return 0
    for what in ("fingerprint", "mode", "head_model"):
        then, now = getattr(before, what), getattr(about, what)
        if then != now:
            raise ConfigError(f"{saved.folder} is a run with {what} {then!r}, this is {now!r}")
    return steps[-1] if steps else 0


def _room(folder: Path, trained: Sequence[torch.nn.Parameter]) -> None:
    """Refuse a folder without room for the checkpoints."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error}") from error
    # Weights and two fp32 numbers of the optimiser each: two checkpoints and a partial third.
    wanted = 3 * sum(each.numel() * (each.element_size() + 8) for each in trained)
    if free < wanted:
        raise ConfigError(
            f"{folder} has room for {free / 1e6:.0f} MB, checkpoints take up to "
            f"{wanted / 1e6:.0f} MB"
        )
