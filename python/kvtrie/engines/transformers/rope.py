"""RopeLimits: the lengths of a sequence at which a model begins to rotate its keys in another way.

Most kinds of RoPE rotate a key by its position alone. LongRoPE has one set of frequencies for
sequences up to its original length and another beyond: KV of the two has different scopes.
Dynamic RoPE has others for each length beyond the original one: those are refused.
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

# How transformers calls rotations that depend on the position alone.
_PLAIN = frozenset({"default", "linear", "yarn", "llama3", "proportional", "mrope"})


@dataclass(frozen=True, slots=True)
class RopeLimits:
    """The lengths at which a model's rotations change.

    Attributes:
        switches: ascending lengths; a sequence longer than one is rotated in another way.
        limit: longest sequence that is rotated by positions alone; None where there is no limit.
        window: longest sequence whose keys are all attended to. Beyond it Doge chooses keys by
            their values, which ties decide by how a prompt was cut; None where nothing is chosen.
    """

    switches: tuple[int, ...] = ()
    limit: int | None = None
    window: int | None = None

    @classmethod
    def of(cls, config: Any) -> RopeLimits:  # noqa: ANN401 - a PretrainedConfig
        """Read a transformers configuration; of a multimodal one, the text part.

        Raises:
            ConfigError: a kind of RoPE that is not known here.
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
                # At the original length itself, the frequencies of a longer pass before it stay.
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
        """Longest sequence rotated as one pass over `total` tokens; None where all longer are."""
        if self.limit is not None:
            return max(total, self.limit)
        return next((switch for switch in self.switches if total <= switch), None)

    def regime(self, length: int) -> int:
        """Return the number of switches below `length` tokens.

        Raises:
            ConfigError: beyond the limit or the window.
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
        """Refuse a pass up to `length` tokens that does not rotate as this regime does.

        Raises:
            ConfigError: the pass is in another regime, or beyond the limit.
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
        """The scope of KV that was rotated in this regime; the given one in the first."""
        if regime == 0:
            return scope
        scope = scope or Scope()
        return replace(scope, lora=f"{scope.lora} rope beyond {self.switches[regime - 1]}")

    def reach(self, regime: int) -> int | None:
        """A position that puts each pass it is in into this regime; None for the first one."""
        return self.switches[regime - 1] if regime else None
