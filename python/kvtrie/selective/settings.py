"""CacheSettings: what a selective cache is asked to be, before it knows a model.

Invariant: a name is `{policy}-{buffers}`; arguments that a policy lacks are refused by the policy.
Cost: none.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (torch leaves parts untyped)

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvtrie.selective.arguments import CacheArguments
from kvtrie.settings.argument import few, flag, instance, put, text, whole

__all__ = ["CacheSettings"]

_MOST = 2**31 - 1
_MOST_LAYERS = 65_535


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """A policy, its buffers, the number of rows and the lengths of steps.

    Attributes:
        name: `{policy}-{buffers}`, such as "h2o-torch-quantized8" or "lastrec-default".
        cache_length: rows per layer, of each batch row and KV head; one number, or one per layer.
            That of a layer with a window is not used: it keeps its window.
        chunk_size: tokens of each step after the first one, which fills the cache.
        randomize_chunk_sizes: draw each such step from five sizes around `chunk_size`.
        seed: of those draws.
        cache_kwargs: what the policy takes: `grace_period`, `max_chunk_size`,
            `keep_initial_fraction`, `normalize_scores`, `prefill_scores`, `sinks`, and of some
            policies more.

    Raises:
        ConfigError: a number that cannot be, an argument that no policy knows.
    """

    name: str = "h2o-torch-quantized8"
    cache_length: int | Sequence[int] = 16384
    chunk_size: int = 1024
    randomize_chunk_sizes: bool = False
    seed: int = 0
    cache_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        length: Any = self.cache_length
        if isinstance(length, Sequence):
            length = tuple(
                whole("cache_length", each, 1, _MOST)
                for each in few("cache_length", length, _MOST_LAYERS)
            )
        else:
            length = whole("cache_length", length, 1, _MOST)
        put(
            self,
            name=text("name", self.name),
            cache_length=length,
            chunk_size=whole("chunk_size", self.chunk_size, 1, _MOST),
            randomize_chunk_sizes=flag("randomize_chunk_sizes", self.randomize_chunk_sizes),
            seed=whole("seed", self.seed, 0, 2**63 - 1),
            cache_kwargs=dict(instance("cache_kwargs", self.cache_kwargs, Mapping)),
        )
        CacheArguments.of(self.cache_kwargs)
