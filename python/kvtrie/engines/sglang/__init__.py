"""SGLang: kvtrie's trie as its radix cache, and its disk as a storage of HiCache.

`radix` has the cache that `--radix-cache-backend kvtrie` names, `storage` the class that
`--hicache-storage-backend dynamic` loads; `plugin` makes the name known.
Cost: importing this package imports neither SGLang nor torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["KvtrieHiCache", "KvtrieRadixCache"]  # pyright: ignore[reportUnsupportedDunderAll] - below

_HOMES = {"KvtrieHiCache": "storage", "KvtrieRadixCache": "radix"}


def __getattr__(name: str) -> Any:  # noqa: ANN401 - a class that SGLang's own base makes
    if name in _HOMES:
        return getattr(import_module(f"kvtrie.engines.sglang.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
