"""Steps: how a sequence is cut so that every layer's cache can take each step.

The first step fills the shortest cache, no step goes beyond the filling of any, all others are of
`chunk_size` tokens or of sizes drawn around it. Windows limit no step; where every layer has one,
the first step is like the others.
Invariant: the cut from a position depends on the settings and the position alone.
Cost: one comparison per step and layer.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from kvtrie.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtrie.selective.buffered import KVCacheWithBuffers
    from kvtrie.selective.settings import CacheSettings

__all__ = ["cut", "too_long"]

_SIZES = 5


def cut(
    caches: Sequence[KVCacheWithBuffers], settings: CacheSettings, start: int, total: int
) -> list[int]:
    """Lengths of the steps from position `start` to `total`.

    Raises:
        ConfigError: the cache cannot take `total` tokens.
    """
    size = settings.chunk_size
    sizes = [size]
    if settings.randomize_chunk_sizes:
        draw = random.Random(settings.seed)  # noqa: S311 - nothing is secret here
        sizes = [draw.randint(size - size // 2, size + size // 2) for _ in range(_SIZES)]
    steps: list[int] = []
    at = start
    windows = all(cache.span is not None for cache in caches)
    while at < total:
        wanted = total - at
        if at or windows:
            draw = random.Random(f"{settings.seed} {at}")  # noqa: S311
            wanted = min(wanted, max(1, draw.choice(sizes)))
        most = min(cache.step_at(at) for cache in caches)
        if not most:
            raise too_long(caches, at, total)
        steps.append(min(wanted, most))
        at += steps[-1]
    return steps


def too_long(caches: Sequence[KVCacheWithBuffers], at: int, total: int) -> ConfigError:
    """The error of a sequence of `total` tokens that a cache takes no further than `at`."""
    short = min(cache.cache_length for cache in caches if not cache.step_at(at))
    return ConfigError(
        f"a sequence of {total} tokens is longer than the {short} rows of a dense cache: "
        "give it more rows, or take a policy that evicts"
    )
