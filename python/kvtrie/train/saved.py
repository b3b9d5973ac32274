"""Saved: writes and reads the checkpoints of a run.

A checkpoint is a folder with `adapter` or `model`, the weights of the head, if any, and the `state`
of the optimiser.
Invariant: a checkpoint is complete or missing. Cost: a write of the trained weights and of the
optimiser's numbers.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (torch and peft leave parts untyped)

from __future__ import annotations

import json
import re
import shutil
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvtrie.errors import ConfigError
from kvtrie.train.files import whole_folder, write_whole

if TYPE_CHECKING:
    from pathlib import Path

    from kvtrie.train.head import HeadModel

__all__ = ["About", "Saved"]

_ABOUT = "run.json"
_STEP = re.compile(r"step-(\d{8})")
_MOST_CHECKPOINTS = 2


@dataclass(frozen=True, slots=True)
class About:
    """Description of a run.

    Attributes:
        model: the command-line argument MODEL.
        fingerprint: fingerprint of its weights.
        mode: mode of the run.
        head_model: name of the head.
        labels: tokens of the head's labels.
        kv_cache: settings of its cache, None in runs of older versions.
        yarn_rope: whether RoPE was scaled beyond the trained length, None in runs of older
            versions.
        data: name and arguments of its `DataModule`, None in runs of older versions.
    """

    model: str
    fingerprint: str
    mode: str
    head_model: str
    labels: list[list[int]]
    kv_cache: dict[str, Any] | None = None
    yarn_rope: bool | None = None
    data: dict[str, Any] | None = None


class Saved:
    """The checkpoints in a run's folder.

    Args:
        folder: the run's `out_dir`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, about: About) -> None:
        """Write the run's description."""
        description = {name: getattr(about, name) for name in About.__slots__}
        text = json.dumps(description, indent=1, default=str)
        write_whole(self.folder / _ABOUT, text.encode())

    def about(self) -> About | None:
        """Return the run's description, or None for a folder without a run.

        Raises:
            ConfigError: the description cannot be read.
        """
        path = self.folder / _ABOUT
        if not path.is_file():
            return None
        try:
            return About(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"cannot read {path}: {error}") from error

    def steps(self) -> list[int]:
        """Return the optimiser steps with a checkpoint, ascending."""
        if not self.folder.is_dir():
            return []
        found = (_STEP.fullmatch(each.name) for each in self.folder.iterdir())
        return sorted(int(each[1]) for each in found if each)

    def at(self, step: int) -> Path:
        """Return the folder of a checkpoint."""
        return self.folder / f"step-{step:08d}"

    def write(
        self,
        step: int,
        model: Any,  # noqa: ANN401 - a PeftModel or a PreTrainedModel
        head: HeadModel,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        """Write a checkpoint and delete all older checkpoints except the latest.

        Raises:
            ConfigError: the checkpoint cannot be written.
        """
        with whole_folder(self.at(step)) as folder:
            kind = "adapter" if hasattr(model, "peft_config") else "model"
            model.save_pretrained(folder / kind)
            if list(head.parameters()):
                torch.save(head.state_dict(), folder / "head.pt")
            torch.save({"step": step, "optimizer": optimizer.state_dict()}, folder / "state.pt")
        for old in self.steps()[:-_MOST_CHECKPOINTS]:
            shutil.rmtree(self.at(old), ignore_errors=True)

    def restore(
        self,
        step: int,
        model: Any,  # noqa: ANN401 - a PeftModel or a PreTrainedModel
        head: HeadModel,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        """Load model, head and optimiser from a checkpoint."""
        self.load(step, model, head)
        state = torch.load(self.at(step) / "state.pt", weights_only=True, map_location="cpu")
        optimizer.load_state_dict(state["optimizer"])

    def load(self, step: int, model: Any, head: HeadModel | None = None) -> None:  # noqa: ANN401
        """Load the weights of a checkpoint into a model of the same structure.

        Raises:
            ConfigError: the checkpoint cannot be read, or belongs to a different model.
        """
        folder = self.at(step)
        try:
            if (folder / "adapter").is_dir():
                from peft import load_peft_weights, set_peft_model_state_dict

                weights = load_peft_weights(str(folder / "adapter"), device="cpu")
                set_peft_model_state_dict(model, weights)
            else:
                weights = _weights(folder / "model")
                missing = model.load_state_dict(weights, strict=False).missing_keys
                own = {name for name, _ in model.named_parameters()}
                if lost := sorted(own & set(missing) - {"lm_head.weight"}):
                    raise ConfigError(f"{folder} lacks {lost[:3]}: it is of another model")
        except (OSError, RuntimeError, KeyError) as error:
            raise ConfigError(f"cannot read the checkpoint {folder}: {error}") from error
        if head is not None:
            self.load_head(step, head)

    def load_head(self, step: int, head: HeadModel) -> None:
        """Load a checkpoint's weights of the head, if any.

        Raises:
            ConfigError: the weights cannot be read, or belong to a different head.
        """
        path = self.at(step) / "head.pt"
        try:
            if path.is_file():
                head.load_state_dict(torch.load(path, weights_only=True, map_location="cpu"))
        except (OSError, RuntimeError) as error:
            raise ConfigError(f"cannot read {path}: {error}") from error

    def merged(self, model: Any) -> Any:  # noqa: ANN401 - a PreTrainedModel, both
        """Return a model with the run's latest weights, including merged adapters.

        Raises:
            ConfigError: the run has no checkpoint.
        """
        steps = self.steps()
        if not steps:
            raise ConfigError(f"{self.folder} has no checkpoint yet")
        folder = self.at(steps[-1])
        if not (folder / "adapter").is_dir():
            self.load(steps[-1], model)
            return model
        from peft import PeftModel

        with warnings.catch_warnings():
            # peft uses deprecated names of transformers.
            warnings.simplefilter("ignore", FutureWarning)
            adapted: Any = PeftModel.from_pretrained(model, str(folder / "adapter"))
        return adapted.merge_and_unload()


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    for each in sorted(folder.glob("*.safetensors")):
        found |= load_file(str(each))
    return found
