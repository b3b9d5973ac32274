"""Yarn: RoPE scaled once for the length that a sequence will have.

Keys are kept rotated, so the scaling must be known before the first one. A model with a scaling of
its own keeps it.
Invariant: the model's own tables are not touched; the scaled ones serve passes over one cache.
Cost: cosines and sines once more per pass.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (transformers leaves parts untyped)

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

__all__ = ["Yarn"]


class Yarn:
    """RoPE for sequences of up to `total` tokens, by YaRN's rule.

    Args:
        config: the model's configuration.
        total: tokens of the longest sequence to come.

    Attributes:
        factor: `max(1, total / trained length)`; 1 where the model has a scaling of its own.
    """

    def __init__(self, config: Any, total: int) -> None:  # noqa: ANN401 - a PretrainedConfig
        stated = dict(config.rope_parameters or {})
        trained = config.max_position_embeddings
        own = stated.get("rope_type", "default") != "default"
        self.factor = 1.0 if own else max(1.0, total / trained)
        self._frequencies: torch.Tensor | None = None
        self._scale = 1.0
        if self.factor > 1:
            scaled: Any = copy.deepcopy(config)
            scaled.rope_parameters = {
                **stated,
                "rope_type": "yarn",
                "factor": self.factor,
                "original_max_position_embeddings": trained,
            }
            make: Any = ROPE_INIT_FUNCTIONS["yarn"]
            self._frequencies, self._scale = make(scaled, torch.device("cpu"))

    def turn(
        self, x: torch.Tensor, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Cosines and sines `(batch, m, dim)` in the type of `x`; None for the model's own."""
        if self._frequencies is None:
            return None
        angles = position_ids[..., None].float() * self._frequencies.to(position_ids.device)
        both = torch.cat((angles, angles), dim=-1)
        return (both.cos() * self._scale).to(x.dtype), (both.sin() * self._scale).to(x.dtype)
