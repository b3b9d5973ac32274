"""vLLM: a KV connector that keeps a server's KV on host and disk, in two halves.

The scheduler's half (`scheduler`) has the manager and decides; a worker's half (`worker`) has the
bytes and obeys. Between them travel `messages`. `connector` is the class that vLLM asks for, and
all here that imports vLLM; `plugin` makes its name known.
Cost: importing this package imports neither vLLM nor torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["KvtrieConnector"]  # pyright: ignore[reportUnsupportedDunderAll] - see below


def __getattr__(name: str) -> Any:  # noqa: ANN401 - a class that vLLM's own base makes
    if name == "KvtrieConnector":
        return getattr(import_module("kvtrie.engines.vllm.connector"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
