"""LoRA: adapters for linear maps of a decoder, by peft.

Invariant: saved adapters are folders for `PeftModel.from_pretrained`. Cost: rank times the width of
a map, per token.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (peft leaves parts untyped)

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from kvtrie.errors import ConfigError
from kvtrie.settings.argument import flag, put, real, whole

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["LoraSettings", "with_lora"]

# Module names in decoders like Llama's, Mistral's and Qwen's.
_MAPS = {
    "query": ("q_proj",),
    "key": ("k_proj",),
    "value": ("v_proj",),
    "projection": ("o_proj",),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
    "head": ("lm_head",),
}
_MOST = 65_536


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """Settings of adapters.

    Attributes:
        r: rank.
        alpha: the output of an adapter is scaled by `alpha / r`.
        dropout: dropout of the adapter's input, in training.
        query: whether the map to queries has an adapter.
        key: the same for the map to keys.
        value: the same for the map to values.
        projection: the same for the map after attention.
        mlp: the same for the three maps of the feed-forward part.
        head: the same for the map to logits.

    Raises:
        ConfigError: a number out of range, or no map.
    """

    r: int = 8
    alpha: float = 16
    dropout: float = 0.05
    query: bool = True
    key: bool = False
    value: bool = True
    projection: bool = False
    mlp: bool = False
    head: bool = False

    def __post_init__(self) -> None:
        put(
            self,
            r=whole("lora.r", self.r, 1, _MOST),
            alpha=real("lora.alpha", self.alpha, 0, 1e9),
            dropout=real("lora.dropout", self.dropout, 0, 1, open_end=True),
            **{name: flag(f"lora.{name}", getattr(self, name)) for name in _MAPS},
        )
        if not self.targets():
            raise ConfigError(f"LoRA without a map: set one of {', '.join(_MAPS)}")

    def targets(self) -> list[str]:
        """Return the names of the modules with adapters."""
        return [each for name, maps in _MAPS.items() if getattr(self, name) for each in maps]


def with_lora(model: PreTrainedModel, settings: LoraSettings) -> Any:  # noqa: ANN401 - a PeftModel
    """Return the model with adapters. Only the adapters are trained.

    Raises:
        ConfigError: peft is missing, or the model has none of these maps.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ConfigError(
            f"{error.name} is not installed; LoRA needs: pip install 'kvtrie[train]'"
        ) from error
    config = LoraConfig(
        r=settings.r,
        lora_alpha=cast("int", settings.alpha),
        lora_dropout=settings.dropout,
        target_modules=settings.targets(),
        task_type="CAUSAL_LM",
    )
    try:
        with warnings.catch_warnings():
            # peft uses deprecated names of transformers.
            warnings.simplefilter("ignore", FutureWarning)
            return get_peft_model(model, config)
    except ValueError as error:
        raise ConfigError(f"LoRA does not fit {type(model).__name__}: {error}") from error
