"""Start of a server's radix cache: checks of the model and settings, and the start-up line.

Invariant: unsupported models and settings are refused by name before any request. Cost: once per
server.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from importlib.metadata import version
from typing import TYPE_CHECKING

from kvtrie.engines.server.startup import OpenTier, log_startup, startup_line, startup_warnings
from kvtrie.engines.server.surface_check import warn
from kvtrie.engines.sglang import surface
from kvtrie.engines.sglang.radix import KvtrieRadixCache
from kvtrie.errors import ConfigError
from kvtrie.settings.argument import shown

if TYPE_CHECKING:
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext

__all__ = ["radix_cache_of"]

_LOG = logging.getLogger("sglang.srt.kvtrie")  # a name shown by SGLang
_KEYS = ("policy", "objective", "share_after", "secret_file")


def radix_cache_of(context: TreeCacheBuildContext) -> KvtrieRadixCache:
    """Return the cache of a server.

    Args:
        context: SGLang's `TreeCacheBuildContext`.

    Raises:
        ConfigError: an unsupported model or setting, for example hierarchical caches.
    """
    warn(surface, version("sglang"))
    for what, present in (
        (
            "models whose layers all have sliding windows",
            context.is_hybrid_swa and context.full_tokens_per_layer == 0,
        ),
        ("hierarchical caches", context.enable_hierarchical_cache),
    ):
        if present:
            raise ConfigError(f"--radix-cache-backend kvtrie does not serve {what}")
    given = dict(context.params.eviction_policy_config or {})
    unknown = [shown(key) for key in given if key not in _KEYS]
    if unknown:
        raise ConfigError(
            f"--radix-eviction-policy-config has no {', '.join(unknown)}: {', '.join(_KEYS)} "
            "are allowed"
        )
    # SGLang's own policy is not used, and would refuse these keys.
    params = replace(context.params, eviction_policy_config=None)
    first = not context.tp_rank and not params.pp_rank
    made = KvtrieRadixCache(
        params,
        count_misses=first and params.enable_metrics,
        windows=bool(context.is_hybrid_swa),
        states=bool(context.is_hybrid_ssm),
        **given,
    )
    if first:
        gpu = [OpenTier("gpu", 0, made.pools.blocks)]
        settings = {"block_tokens": made.page_size, "ranks": context.tp_size}
        line = startup_line(gpu, policy=made.policy, **settings)
        log_startup(_LOG, line, startup_warnings(gpu))
    return made
