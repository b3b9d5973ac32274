"""CacheSettings: settings of a selective cache, independent of a model.

Invariant: a name is `{policy}-{buffers}`. The policy refuses unknown arguments later. Cost: none.
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
        name: `{policy}-{buffers}`, for example "h2o-torch-quantized8" or "lastrec-default".
        cache_length: rows per batch row and KV head: a number for all layers, or a number per
            layer. Ignored for layers with a window, because they keep their window.
        chunk_size: tokens of each step after the first. The first step fills the cache.
        randomize_chunk_sizes: draw the size of each later step from five sizes around `chunk_size`.
        seed: seed of the draws.
        cache_kwargs: arguments of the policy: `grace_period`, `max_chunk_size`,
            `keep_initial_fraction`, `normalize_scores`, `prefill_scores`, `sinks`, and more for
            some policies.

    Raises:
        ConfigError: a number out of range, or an argument unknown to all policies.
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
