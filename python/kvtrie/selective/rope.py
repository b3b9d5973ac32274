"""FixedRope: RoPE fixed once for the length that a sequence will have.

Keys are kept rotated, so their rotation must be known before the first one: YaRN's scaling,
LongRoPE's set of frequencies and dynamic RoPE's base depend on the length of the whole sequence.
Invariant: all passes over one cache rotate as one pass over the whole sequence does; the model's
own tables are not touched.
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

from kvtrie.engines.transformers.rope import RopeLimits
from kvtrie.errors import ConfigError
from kvtrie.model.model_config import groups_of

__all__ = ["FixedRope", "SequenceRope"]

_FULL = "full_attention"


class FixedRope:
    """RoPE for one sequence of up to `total` tokens.

    Args:
        rotary: the model's own rotary module.
        config: the model's configuration.
        total: tokens of the longest sequence to come.
        yarn: whether a model without RoPE scaling is scaled beyond its trained length, by YaRN's
            rule.

    Attributes:
        factor: YaRN's, `max(1, total / trained length)`; 1 where the model has its own scaling.
        reach: longest sequence that is rotated so; None where there is no limit.

    Raises:
        ConfigError: a kind of RoPE that is not known.
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
        # Without the state that other passes leave in the model's own module.
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
        """Refuse a sequence that one pass would rotate in another way.

        Raises:
            ConfigError: it is longer than `reach`.
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
        """Cosines and sines `(batch, m, dim)` in the type of `x`; None for the model's own.

        Args:
            x: says the type.
            position_ids: `(batch, m)`.
            layer_type: of the layers that are rotated so, where a model has tables by it.
        """
        if self._rotary is not None:
            # transformers chooses frequencies by the largest position of a call: the last one.
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
        fixed: what keys are rotated by; None until the length of the sequences is known.
    """

    def __init__(self, rotary: torch.nn.Module, config: Any, *, yarn: bool) -> None:  # noqa: ANN401
        self._rotary = rotary
        self._config = config
        self._yarn = yarn
        self.fixed: FixedRope | None = None

    def fix(self, total: int, past: int) -> FixedRope:
        """Fix RoPE for sequences of `total` tokens, if no key was rotated in `past` tokens yet.

        Raises:
            ConfigError: as `FixedRope`.
        """
        if self.fixed is None or past == 0:
            self.fixed = FixedRope(self._rotary, self._config, total, yarn=self._yarn)
        return self.fixed

    @property
    def factor(self) -> float:
        """By what RoPE is scaled; 1 leaves it as the model has it."""
        return 1.0 if self.fixed is None else self.fixed.factor


def _windows_alone(config: Any) -> bool:  # noqa: ANN401 - a PretrainedConfig
    """Whether every layer has a window."""
    groups = groups_of(config, config.num_hidden_layers)
    return bool(groups) and all(group.kind == "sliding" for group in groups)
