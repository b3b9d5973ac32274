"""Plug-in: registers `--radix-cache-backend kvtrie` with SGLang.

The entry point `sglang.srt.plugins` calls `register` in every process of a server. Invariant:
repeated calls change nothing. Cost: a dictionary entry.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["register"]


def register() -> None:
    """Register the factory, unless the name is already registered."""
    registry = import_module("sglang.srt.mem_cache.registry")
    if registry.get_radix_cache_factory("kvtrie") is None:
        registry.register_radix_cache_backend("kvtrie", _make)


def _make(context: Any) -> Any:  # noqa: ANN401 - SGLang's own
    from kvtrie.engines.sglang.radix_start import radix_cache_of

    return radix_cache_of(context)
