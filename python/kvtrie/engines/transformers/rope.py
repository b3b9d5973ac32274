"""RopeLimits: sequence lengths at which a model changes its RoPE frequencies.

Most kinds of RoPE rotate a key by its position alone. LongRoPE has different frequencies up to its
original length and beyond, so KV of longer sequences gets a separate scope. Dynamic RoPE has new
frequencies for each length beyond the original length, so longer sequences are refused.
Invariant: KV of equal tokens in equal scopes was rotated by equal frequencies.
Cost: a comparison per pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from kvtrie import Scope
from kvtrie.errors import ConfigError

__all__ = ["RopeLimits"]

# transformers' names of rotations by position alone.
_PLAIN = frozenset({"default", "linear", "yarn", "llama3", "proportional", "mrope"})


@dataclass(frozen=True, slots=True)
class RopeLimits:
    """Sequence lengths at which a model's rotations change.

    Attributes:
        switches: ascending lengths. Sequences longer than a switch are rotated differently.
        limit: longest sequence rotated by positions alone, None for no limit.
        window: longest sequence with attention to all keys. Beyond it Doge selects keys by their
            values, and ties depend on the split of a prompt into passes. None for no selection.
    """

    switches: tuple[int, ...] = ()
    limit: int | None = None
    window: int | None = None

    @classmethod
    def of(cls, config: Any) -> RopeLimits:  # noqa: ANN401 - a PretrainedConfig
        """Read a transformers configuration, or the text part of a multimodal configuration.

        Raises:
            ConfigError: an unknown kind of RoPE.
        """
        config = config.get_text_config(decoder=True)
        stated = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
        settings = cast("Mapping[str, Any]", stated or {})
        switches: set[int] = set()
        limit: int | None = None
        nested = [
            cast("Mapping[str, Any]", each)
            for each in settings.values()
            if isinstance(each, Mapping)
        ]
        for each in nested or [settings]:
            kind = each.get("rope_type") or each.get("type") or "default"
            if kind == "longrope":
                original = each.get("original_max_position_embeddings")
                switches.add(original or config.max_position_embeddings)
            elif kind == "dynamic":
                # At exactly the original length, frequencies of an earlier longer pass remain.
                limit = config.max_position_embeddings - 1
            elif kind not in _PLAIN:
                supported = ", ".join(sorted(_PLAIN | {"longrope", "dynamic"}))
                raise ConfigError(f"no cache is known for rope_type {kind!r}, only for {supported}")
        window = getattr(config, "keep_window_size", None)
        return cls(tuple(sorted(switches)), limit, window)

    @property
    def varies(self) -> bool:
        """Whether rotations depend on the length of the sequence."""
        return bool(self.switches) or self.limit is not None

    def reach_of(self, total: int) -> int | None:
        """Return the longest sequence with the rotation of `total` tokens, None for no limit."""
        if self.limit is not None:
            return max(total, self.limit)
        return next((switch for switch in self.switches if total <= switch), None)

    def regime(self, length: int) -> int:
        """Return the number of switches below `length` tokens.

        Raises:
            ConfigError: `length` is beyond the limit or the window.
        """
        if self.limit is not None and length > self.limit:
            raise ConfigError(
                f"dynamic RoPE rotates all keys again with each token beyond {self.limit}, so KV "
                f"of {length} tokens cannot be kept: run such a sequence without KvtrieCache"
            )
        if self.window is not None and length > self.window:
            raise ConfigError(
                f"this model attends to {self.window} chosen keys of a longer sequence "
                f"(keep_window_size), so its KV of {length} tokens is not that of its tokens "
                "alone: run such a sequence without KvtrieCache"
            )
        return sum(length > switch for switch in self.switches)

    def check(self, length: int, regime: int) -> None:
        """Refuse a pass up to `length` tokens outside a regime.

        Raises:
            ConfigError: the pass is in a different regime, or beyond the limit.
        """
        if self.regime(length) != regime:
            long = self.regime(length) > regime
            switch = self.switches[regime if long else regime - 1]
            raise ConfigError(
                f"RoPE rotates otherwise beyond {switch} tokens, and the cache was opened for a "
                f"batch of {'at most' if long else 'more than'} that: a pass up to {length} tokens "
                "does not continue it; open a KvtrieCache for all tokens and pass at once what "
                "it lacks"
            )

    def scope(self, scope: Scope | None, regime: int) -> Scope | None:
        """Return the scope for KV of a regime. The first regime keeps the given scope."""
        if regime == 0:
            return scope
        scope = scope or Scope()
        return replace(scope, lora=f"{scope.lora} rope beyond {self.switches[regime - 1]}")

    def reach(self, regime: int) -> int | None:
        """Return a position that puts a pass into a regime, None for the first regime."""
        return self.switches[regime - 1] if regime else None
