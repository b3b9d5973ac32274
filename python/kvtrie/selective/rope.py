"""FixedRope: RoPE fixed in advance for the final length of a sequence.

Keys are stored rotated, so their rotation must be known before the first key. YaRN's scaling,
LongRoPE's set of frequencies and dynamic RoPE's base depend on the length of the whole sequence.
Invariant: all passes over a cache rotate like a single pass over the whole sequence. The model's
own tables are unchanged.
Cost: a second computation of cosines and sines per pass.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (transformers leaves parts untyped)

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvtrie.engines.transformers.rope import RopeLimits
from kvtrie.errors import ConfigError
from kvtrie.model.model_config import groups_of

__all__ = ["FixedRope", "SequenceRope"]

_FULL = "full_attention"


class FixedRope:
    """RoPE for a sequence of up to `total` tokens.

    Args:
        rotary: the model's own rotary module.
        config: the model's configuration.
        total: tokens of the longest expected sequence.
        yarn: whether a model without RoPE scaling is scaled beyond its trained length, by YaRN's
            rule.

    Attributes:
        factor: YaRN's factor, `max(1, total / trained length)`, or 1 for a model with its own
            scaling.
        reach: longest supported sequence, None without a limit.

    Raises:
        ConfigError: an unknown kind of RoPE.
    """

    def __init__(
        self,
        rotary: torch.nn.Module,
        config: Any,  # noqa: ANN401 - a PretrainedConfig
        total: int,
        *,
        yarn: bool,
    ) -> None:
        limits = RopeLimits.of(config)
        stated: dict[str, Any] = dict(config.rope_parameters or {})
        # Windows keep their own rotation: within them positions are as near as in training.
        self._apart = isinstance(stated.get(_FULL), dict)
        if self._apart:
            stated = dict(stated[_FULL])
        yarn = yarn and not _windows_alone(config)
        trained = config.max_position_embeddings
        own = stated.get("rope_type", "default") != "default"
        self._total = total
        self.reach = limits.reach_of(total)
        # A copy, without the state left in the model's own module by its passes.
        self._rotary: Any = type(rotary)(config) if limits.varies else None
        self.factor = max(1.0, total / trained) if yarn and not own else 1.0
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

    def check(self, length: int) -> None:
        """Refuse a sequence with a different rotation in a single pass.

        Raises:
            ConfigError: the sequence is longer than `reach`.
        """
        if self.reach is not None and length > self.reach:
            raise ConfigError(
                f"RoPE of this model depends on the length: keys are rotated for sequences of up "
                f"to {self.reach} tokens, and a pass reaches {length}; call "
                "SelectiveCache.steps with the number of tokens to come, answer included, before "
                "the first pass, or use kvtrie.selective.generate"
            )

    def rotation(
        self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return cosines and sines `(batch, m, dim)`, or None for the model's own tables.

        Args:
            x: a tensor of the result's type.
            position_ids: `(batch, m)`.
            layer_type: type of the layers, for a model with tables by type.
        """
        if self._rotary is not None:
            # transformers chooses frequencies by the largest position of a call: add the last.
            last = torch.full_like(position_ids[..., :1], self._total - 1)
            rotary = self._rotary.to(position_ids.device)
            kind = () if layer_type is None else (layer_type,)
            cos, sin = rotary(x, torch.cat((position_ids, last), dim=-1), *kind)
            return cos[..., :-1, :], sin[..., :-1, :]
        if self._frequencies is None or (self._apart and layer_type != _FULL):
            return None
        angles = position_ids[..., None].float() * self._frequencies.to(position_ids.device)
        both = torch.cat((angles, angles), dim=-1)
        return (both.cos() * self._scale).to(x.dtype), (both.sin() * self._scale).to(x.dtype)


class SequenceRope:
    """RoPE of the sequences of a cache, fixed before the first key is rotated.

    Args:
        rotary: the model's own rotary module.
        config: the model's configuration.
        yarn: as for `FixedRope`.

    Attributes:
        fixed: RoPE of the keys, None until the length of the sequences is known.
    """

    def __init__(self, rotary: torch.nn.Module, config: Any, *, yarn: bool) -> None:  # noqa: ANN401
        self._rotary = rotary
        self._config = config
        self._yarn = yarn
        self.fixed: FixedRope | None = None

    def fix(self, total: int, past: int) -> FixedRope:
        """Fix RoPE for sequences of `total` tokens, unless it is in use for `past` tokens.

        Raises:
            ConfigError: as for `FixedRope`.
        """
        if self.fixed is None or past == 0:
            self.fixed = FixedRope(self._rotary, self._config, total, yarn=self._yarn)
        return self.fixed

    @property
    def factor(self) -> float:
        """Scale of RoPE, 1 for the model's own RoPE."""
        return 1.0 if self.fixed is None else self.fixed.factor


def _windows_alone(config: Any) -> bool:  # noqa: ANN401 - a PretrainedConfig
    """Return whether every layer has a window."""
    groups = groups_of(config, config.num_hidden_layers)
    return bool(groups) and all(group.kind == "sliding" for group in groups)
