"""Passes: checks and runs the passes of a model over a cache.

Invariant: a pass accepted by `check` computes KV from tokens alone, with the RoPE rotation of the
cache. Cost: a trial per model object at opening, and `Guard.check` per pass.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from kvtrie import Scope
from kvtrie.engines.identity.fingerprint import require_same
from kvtrie.engines.identity.model_state import ModelState
from kvtrie.engines.transformers.guard import Guard
from kvtrie.engines.transformers.layer_trial import Tried, no_cache, shape_of, try_layers
from kvtrie.engines.transformers.rope import RopeLimits
from kvtrie.engines.transformers.trial import check_stated, trial
from kvtrie.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray
    from transformers import Cache, PreTrainedModel

    from kvtrie import ModelShape
    from kvtrie.engines.transformers.guard import Pass
    from kvtrie.tiers import Pool
    from kvtrie.transfer import Executor

__all__ = ["Passes"]


class Passes:
    """The passes of a model for a batch.

    Args:
        model: the model, in evaluation mode.
        executor: its manager keeps the model's KV.
        pools: the memory of the first tier, by group of layers.
        longest: tokens of the longest prompt.

    Attributes:
        model: the model.
        entry: the innermost module of the model called with tokens and a cache.
        guard: checks of the model's passes.
        tried: cache contents of each layer, None for a model with a single group.
        reach: a position that puts a pass into the batch's RoPE regime, None if rotations depend on
            positions alone.

    Raises:
        ConfigError: the model's KV depends on more than tokens, or does not match the manager and
            its first tier.
    """

    def __init__(
        self, model: PreTrainedModel, executor: Executor, pools: Sequence[Pool], longest: int
    ) -> None:
        self.model, self._manager = model, executor.manager
        mine, pool, separate_groups = self._manager.model, pools[0], len(pools) > 1
        if not separate_groups:  # otherwise the trial compares the layers
            check_stated(model, mine, pool)
        self.guard = Guard(model)
        self.guard.ready()
        self._rope = RopeLimits.of(model.config)
        state = ModelState.of(model)
        require_same(self._manager, model, state)
        self.tried = _tried(model, mine, pool, state) if separate_groups else None
        self.entry = self.tried.entered() if self.tried else trial(model, pool, state)
        self._seen = False
        self._regime = self._rope.regime(longest)
        self.reach = self._rope.reach(self._regime)

    def scope(self, scope: Scope | None) -> Scope | None:
        """Return a scope extended by the RoPE regime, without holes if they cannot be filled."""
        found = self._rope.scope(scope, self._regime)
        if self.guard.fills and self.tried is None:
            return found
        return replace(found or Scope(), structure="leaf-only")

    def check(self, given: Mapping[str, Any], past: int, pads: Sequence[int]) -> Pass:
        """Check the arguments of a pass, as `Guard.check`, and its length."""
        seen = self.guard.check(given, past, pads)
        self._rope.check(seen.length, self._regime)
        return seen

    def require_same(self) -> None:
        """Refuse a changed model, as `fingerprint.require_same`."""
        if not self._seen:
            require_same(self._manager, self.model)

    def run(self, tokens: NDArray[np.int64], start: int, cache: Cache) -> None:
        """Run a pass over tokens of a row after `start` cached tokens.

        Used by opening. The model has just been checked, so it is not checked again.
        """
        ids = torch.as_tensor(tokens, device=self.model.device)[None]
        positions = torch.arange(start, start + len(tokens), device=ids.device)[None]
        given = {"input_ids": ids, "position_ids": positions, "use_cache": True}
        self._seen = True
        try:
            with torch.no_grad():
                self.entry(**given, past_key_values=cache)
        finally:
            self._seen = False

    def computes(self, longest: int) -> bool:
        """Return whether the model can compute single tokens of prompts up to this length."""
        return self.guard.fills and self.guard.recovers(longest)


def _tried(model: PreTrainedModel, mine: ModelShape, pool: Pool, state: ModelState) -> Tried:
    """Try a model, and compare its layers with the groups of the manager's model."""
    no_cache()
    tried = try_layers(model, state)
    real = shape_of(model, tried, fingerprint=mine.fingerprint)
    theirs = replace(mine, query_heads=real.query_heads, hidden=real.hidden)
    if real.identity() != theirs.identity() or mine.tp != 1:
        raise ConfigError(
            f"the layers of {type(model.base_model).__name__} keep {real.identity().strip()}, "
            f"the manager's model {theirs.identity().strip()}: kvtrie.engines.transformers."
            "model_shape(model) gives the first"
        )
    if model.device.type != pool.device.type:
        raise ConfigError(
            f"the model is on {model.device.type}, the first tier on {pool.device.type}"
        )
    for number, group in enumerate(mine.groups[1:], 1):
        if group.kind not in ("sliding", "state"):
            raise ConfigError(f"group {number} of kind {group.kind!r} is not supported here")
    return tried
