"""Steps: cuts a sequence into steps with lengths allowed by every layer's cache.

The first step fills the shortest cache. No step crosses the end of the free rows of any cache.
Later steps have `chunk_size` tokens or sizes drawn around it. Windows limit no step. If every layer
has a window, the first step has the same size as later steps.
Invariant: the cut from a position depends only on the settings and the position.
Cost: a comparison per step and layer.
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
    """Return the lengths of the steps from position `start` to `total`.

    Raises:
        ConfigError: the cache cannot take `total` tokens.
    """
    size = settings.chunk_size
    sizes = [size]
    if settings.randomize_chunk_sizes:
        draw = random.Random(settings.seed)  # noqa: S311 - not used for secrets
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
    """Return the error for a sequence of `total` tokens in a cache full at position `at`."""
    short = min(cache.cache_length for cache in caches if not cache.step_at(at))
    return ConfigError(
        f"a sequence of {total} tokens is longer than the {short} rows of a dense cache: "
        "give it more rows, or take a policy that evicts"
    )
