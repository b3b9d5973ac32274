"""Saved: checkpoints of a run, and finding them again.

A checkpoint is a folder: `adapter` or `model`, the head's weights where it has some, and `state`
of the optimiser.
Invariant: a checkpoint is there whole or not at all. Cost: writing the trained weights, and the
optimiser's numbers, once.
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
        model: what was written for MODEL.
        fingerprint: of its weights.
        mode: of the run.
        head_model: its head's name.
        labels: tokens of the head's labels.
        kv_cache: settings of its cache; None in runs of versions that did not say.
        yarn_rope: whether RoPE was scaled beyond the trained length; None as for `kv_cache`.
        data: name and arguments of its `DataModule`; None as for `kv_cache`.
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
        """Say what the run is of."""
        description = {name: getattr(about, name) for name in About.__slots__}
        text = json.dumps(description, indent=1, default=str)
        write_whole(self.folder / _ABOUT, text.encode())

    def about(self) -> About | None:
        """The run's description; None if the folder has no run.

        Raises:
            ConfigError: the file that says it cannot be read.
        """
        path = self.folder / _ABOUT
        if not path.is_file():
            return None
        try:
            return About(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"cannot read {path}: {error}") from error

    def steps(self) -> list[int]:
        """Optimiser steps that have a checkpoint."""
        if not self.folder.is_dir():
            return []
        found = (_STEP.fullmatch(each.name) for each in self.folder.iterdir())
        return sorted(int(each[1]) for each in found if each)

    def at(self, step: int) -> Path:
        """The folder of a checkpoint."""
        return self.folder / f"step-{step:08d}"

    def write(
        self,
        step: int,
        model: Any,  # noqa: ANN401 - a PeftModel or a PreTrainedModel
        head: HeadModel,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        """Write a checkpoint; of those before, the last stays.

        Raises:
            ConfigError: it cannot be written.
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
        """Become what a checkpoint says."""
        self.load(step, model, head)
        state = torch.load(self.at(step) / "state.pt", weights_only=True, map_location="cpu")
        optimizer.load_state_dict(state["optimizer"])

    def load(self, step: int, model: Any, head: HeadModel | None = None) -> None:  # noqa: ANN401
        """Take the weights of a checkpoint into a model that is built as the run's was.

        Raises:
            ConfigError: it cannot be read, or is of another model.
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
        """Take a checkpoint's weights of the head, where it has some.

        Raises:
            ConfigError: they cannot be read, or are of another head.
        """
        path = self.at(step) / "head.pt"
        try:
            if path.is_file():
                head.load_state_dict(torch.load(path, weights_only=True, map_location="cpu"))
        except (OSError, RuntimeError) as error:
            raise ConfigError(f"cannot read {path}: {error}") from error

    def merged(self, model: Any) -> Any:  # noqa: ANN401 - a PreTrainedModel, both
        """A model as the run left it, adapters worked into its weights.

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
            # peft asks transformers for names that are to go.
            warnings.simplefilter("ignore", FutureWarning)
            adapted: Any = PeftModel.from_pretrained(model, str(folder / "adapter"))
        return adapted.merge_and_unload()


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    for each in sorted(folder.glob("*.safetensors")):
        found |= load_file(str(each))
    return found
