"""Decoder: the separate parts of a transformers model.

The parts are the embedding, the layers, the last norm and the map to logits. Layers run as in the
model, with attention by `KVCache`s.
Invariant: all parts in sequence compute the same as the model. Dropout of a layer and step is the
same on every run. Cost: the cost of the parts.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (transformers leaves parts untyped)

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch

from kvtrie.errors import ConfigError
from kvtrie.kernels import Terms
from kvtrie.selective.rope import FixedRope

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel

__all__ = ["Decoder", "Rotation"]

Rotation: TypeAlias = "Mapping[str | None, tuple[torch.Tensor, torch.Tensor]]"
"""Cosines and sines by the kind of a layer, with key None if all layers share tables."""

# Unsupported settings of some models, acting between the parts.
_BETWEEN = (
    "embedding_multiplier",
    "logit_scale",
    "logits_scaling",
    "scale_emb",
)


class Decoder:
    """A model in parts.

    Args:
        model: a causal language model, possibly wrapped by peft.

    Attributes:
        model: the model without peft's wrapper, with adapters.

    Raises:
        ConfigError: a model with unsupported operations between its parts.
    """

    def __init__(self, model: PreTrainedModel | Any) -> None:  # noqa: ANN401 - a PeftModel
        whole: Any = model
        base = getattr(whole, "get_base_model", None)
        self.model: PreTrainedModel = whole if base is None else base()
        parts: Any = cast("Any", self.model).get_decoder()
        self._parts = parts
        self.config: Any = parts.config
        if more := [name for name in _BETWEEN if getattr(self.config, name, None) not in {None, 1}]:
            raise ConfigError(
                f"{type(parts).__name__} has {', '.join(more)}, which gradients by cells do not "
                "know"
            )
        self.layers: list[torch.nn.Module] = list(parts.layers)
        self.embedding: torch.nn.Module = parts.embed_tokens
        self.norm: torch.nn.Module = parts.norm
        self.to_logits: torch.nn.Module = cast("Any", self.model).get_output_embeddings()
        self._softcap: float | None = getattr(self.config, "final_logit_softcapping", None)
        # Gemma 3 has rotation tables per kind of layer.
        stated = (getattr(self.config, "rope_parameters", None) or {}).values()
        apart = any(isinstance(each, Mapping) for each in stated)
        self._kinds: list[str | None] = (
            list(self.config.layer_types) if apart else [None] * len(self.layers)
        )
        self._rope: FixedRope | None = None
        self._seed: int | None = None

    def begin(self, total: int, *, yarn_rope: bool) -> None:
        """Prepare for sequences of `total` tokens: RoPE's scaling, and the seed of dropout."""
        self._rope = FixedRope(self._parts.rotary_emb, self.config, total, yarn=yarn_rope)
        self._seed = None
        if any(_drops(part) for layer in self.layers for part in layer.modules()):
            self._seed = int(torch.randint(2**31, ()).item())

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the inputs of the first layer, `(batch, m, hidden)`."""
        return self.embedding(input_ids)

    def rotation(self, x: torch.Tensor, columns: torch.Tensor) -> Rotation:
        """Return cosines and sines of positions `(batch, m)`, in `x`'s format, by layer kind."""
        return {kind: self._rotation(x, columns, kind) for kind in dict.fromkeys(self._kinds)}

    def _rotation(
        self, x: torch.Tensor, columns: torch.Tensor, kind: str | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scaled = None if self._rope is None else self._rope.rotation(x, columns, kind)
        if scaled is not None:
            return scaled
        more = {} if kind is None else {"layer_type": kind}
        return self._parts.rotary_emb(x, position_ids=columns, **more)

    def run(
        self,
        layer: int,
        step: int,
        hidden: torch.Tensor,
        rotation: Rotation,
    ) -> torch.Tensor:
        """Run a layer over a step, with inputs and outputs `(batch, m, hidden)`."""
        if self._seed is None:
            return self._layer(layer, hidden, rotation)
        # torch.manual_seed would seed every device and record its caller on each call.
        source = torch.default_generator
        if hidden.device.type == "cuda":
            source = torch.cuda.default_generators[hidden.device.index or 0]
        before = source.get_state()
        source.manual_seed(self._seed + layer * 1_000_003 + step * 7919)
        try:
            return self._layer(layer, hidden, rotation)
        finally:
            source.set_state(before)

    def _layer(self, layer: int, hidden: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        out: Any = self.layers[layer](
            hidden,
            attention_mask=None,
            position_embeddings=rotation[self._kinds[layer]],
            past_key_values=None,
        )
        return out[0] if isinstance(out, tuple) else out

    def outputs(self, hidden: torch.Tensor, *, logits: bool) -> torch.Tensor:
        """Return the inputs of a head: logits, or outputs of the last norm."""
        normed = self.norm(hidden)
        if not logits:
            return normed
        found: torch.Tensor = self.to_logits(normed)
        return found if self._softcap is None else Terms(self._softcap).capped(found)

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Return all parameters of the model."""
        return self.model.parameters()


def _drops(part: torch.nn.Module) -> bool:
    """Return whether a module is active dropout."""
    return isinstance(part, torch.nn.Dropout) and part.training and part.p > 0
