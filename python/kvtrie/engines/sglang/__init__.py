"""SGLang integration: kvtrie's trie as radix cache, and its disk as HiCache storage.

`radix` has the cache for `--radix-cache-backend kvtrie`, and `plugin` registers this name.
`storage` has the class for `--hicache-storage-backend dynamic`.
Cost: importing this package imports neither SGLang nor torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["KvtrieHiCache", "KvtrieRadixCache"]  # pyright: ignore[reportUnsupportedDunderAll] - below

_HOMES = {"KvtrieHiCache": "storage", "KvtrieRadixCache": "radix"}


def __getattr__(name: str) -> Any:  # noqa: ANN401 - a class with a base of SGLang
    if name in _HOMES:
        return getattr(import_module(f"kvtrie.engines.sglang.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
