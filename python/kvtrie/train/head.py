"""HeadModel: computes a loss from a model's outputs, step by step, with three built-in heads.

Invariant: for any cut into steps, the losses of the steps add up to the loss of the whole.
Cost: a pass over the outputs.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (torch leaves parts untyped)

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.nn import functional

from kvtrie.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "HEADS",
    "IGNORED",
    "CrossEntropyOnLogits",
    "HeadModel",
    "SequenceClassification",
    "SequenceClassificationOnLogits",
    "make_head",
]

IGNORED = -100
"""Placeholder for no target: padding of targets of unequal lengths."""


class HeadModel(torch.nn.Module, ABC):
    """A loss over the outputs of steps, from left to right.

    A head may keep state over steps. Gradients do not flow through it.
    """

    needs_logits: ClassVar[bool] = True
    """False: outputs are normed hidden states, without the model's map to logits."""

    needs_prompt: ClassVar[bool] = True
    """False: outputs before the first target are neither computed nor passed to `forward`."""

    @abstractmethod
    def forward(
        self, model_outputs: torch.Tensor, targets: torch.Tensor | None, input_pos: int
    ) -> torch.Tensor:
        """Return the losses of a step, summed over its targets.

        Args:
            model_outputs: `(batch, m, vocabulary or hidden)`.
            targets: int64 `(batch, up to m)`, targets of the last outputs, None without targets.
            input_pos: position of the first output. 0 starts a new batch.

        Returns:
            fp32 `(batch,)`.
        """

    def num_target_entries(self, targets: torch.Tensor) -> torch.Tensor:
        """Return the divisor of each batch row's losses, int64 `(batch,)`."""
        return (targets != IGNORED).sum(dim=1)

    def right(self, model_outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor | None:
        """Return the number of predicted targets, int64 `(batch,)`, or None if undefined."""
        del model_outputs, targets
        return None


class CrossEntropyOnLogits(HeadModel):
    """Cross entropy of the next token (next_token_prediction)."""

    needs_prompt: ClassVar[bool] = False

    def forward(
        self, model_outputs: torch.Tensor, targets: torch.Tensor | None, input_pos: int
    ) -> torch.Tensor:
        """Return the losses, see `HeadModel.forward`."""
        del input_pos
        if targets is None:
            return model_outputs.new_zeros(len(model_outputs), dtype=torch.float32)
        logits = model_outputs[:, model_outputs.shape[1] - targets.shape[1] :].float()
        losses = functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none"
        )
        return losses.view(targets.shape).sum(dim=1)

    def right(self, model_outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor | None:
        """Return the number of next tokens predicted by the logits."""
        logits = model_outputs[:, model_outputs.shape[1] - targets.shape[1] :]
        return (logits.argmax(dim=-1) == targets).sum(dim=1)


class _Classes(HeadModel):
    """Cross entropy over classes, after the last token."""

    needs_prompt: ClassVar[bool] = False

    @abstractmethod
    def _classes(self, last: torch.Tensor) -> torch.Tensor:
        """Return the logits `(batch, classes)` of the last output."""

    def forward(
        self, model_outputs: torch.Tensor, targets: torch.Tensor | None, input_pos: int
    ) -> torch.Tensor:
        """Return the losses, see `HeadModel.forward`.

        Raises:
            ConfigError: more than one target.
        """
        del input_pos
        if targets is None:
            return model_outputs.new_zeros(len(model_outputs), dtype=torch.float32)
        if targets.shape[1] != 1:
            raise ConfigError(f"{targets.shape[1]} targets per sequence, one class wanted")
        logits = self._classes(model_outputs[:, -1]).float()
        return functional.cross_entropy(logits, targets[:, 0], reduction="none")

    def right(self, model_outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor | None:
        """Return 1 if the class has the largest logit, else 0."""
        return (self._classes(model_outputs[:, -1]).argmax(dim=-1) == targets[:, 0]).long()


class SequenceClassificationOnLogits(_Classes):
    """Cross entropy over only the logits of labels (seq_classification_on_logits).

    Args:
        labels: the token of each class. Targets are 0 to classes - 1.
    """

    def __init__(self, labels: Sequence[int]) -> None:
        super().__init__()
        self.labels: torch.Tensor
        self.register_buffer("labels", torch.tensor(list(labels)), persistent=False)

    def _classes(self, last: torch.Tensor) -> torch.Tensor:
        return last[:, self.labels.to(last.device)]


class SequenceClassification(_Classes):
    """A new linear map from the last layer's outputs to classes (seq_classification).

    Args:
        hidden: numbers per output.
        classes: number of classes. Targets are 0 to classes - 1.
    """

    needs_logits: ClassVar[bool] = False

    def __init__(self, hidden: int, classes: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(hidden, classes, bias=True)

    def _classes(self, last: torch.Tensor) -> torch.Tensor:
        return self.linear(last)


HEADS = ("next_token_prediction", "seq_classification_on_logits", "seq_classification")
"""Names of head models."""


def make_head(
    name: str,
    model: PreTrainedModel | Any,  # noqa: ANN401 - a PeftModel
    labels: Sequence[int | Sequence[int]] | None = None,
) -> HeadModel:
    """Return the head model of a name.

    Args:
        name: "next_token_prediction", "seq_classification_on_logits" or "seq_classification".
        model: source of sizes, format and device.
        labels: each class's token, or a sequence with its single token. None for
            "next_token_prediction".

    Raises:
        ConfigError: an unknown name, or labels that do not match it.
    """
    if name not in HEADS:
        raise ConfigError(f"head_model is one of {', '.join(HEADS)}, not {name!r}")
    if name == "next_token_prediction":
        if labels:
            raise ConfigError(f"next_token_prediction has no classes, {len(labels)} labels given")
        return CrossEntropyOnLogits()
    few = 2
    if labels is None or len(labels) < few:
        raise ConfigError(
            f"{name} needs at least {few} labels, {0 if labels is None else len(labels)} given"
        )
    if name == "seq_classification":
        made = SequenceClassification(model.config.hidden_size, len(labels))
        return made.to(device=model.device, dtype=model.dtype)
    found: list[int] = []
    for at, label in enumerate(labels):
        tokens = list(label) if isinstance(label, Sequence) else [label]
        if len(tokens) != 1:
            raise ConfigError(f"label {at} has {len(tokens)} tokens, one wanted: {tokens[:9]}")
        found.append(tokens[0])
    if len(set(found)) != len(found):
        raise ConfigError(f"labels share a token: {found[:20]}")
    return SequenceClassificationOnLogits(found)
