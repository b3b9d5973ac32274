"""vLLM: a KV connector that keeps a server's KV on host and disk.

```text
connector --> scheduler --> matching, admission --> misses      decisions about requests
    |             +--> orders, reports --> messages              and about each step
    |             |      +--> commits, loads --> requests --> waiting, running, hints, scope
    |             |                                  +--> sequence --> native_first
    |             +--> cache --> store_moves, store_client, events, metrics, proofs, restored
    |             +--> versions                         KV of older weights
    +--> worker --> kv_writer --> learned_views        bytes in vLLM's layout
    |       +--> rank_store, replicated --> shared_memory, kept_host, age_writer
    |       +--> step_copies --> device_reports
    +--> weights --> held_adapters, layout_check, start_options --> excluded      stored KV's name
disk_tier --> offloading --> board      vLLM's own offloading with our disk below
surface --> calls                                     what is used of vLLM
connector, disk_tier --> data_parallel            the part of a disk that a rank has
middleware --> prompt_lengths --> asgi      hints out of HTTP requests, in the HTTP server's process
    +--> served_settings
```

In the scheduler's process (`scheduler`) it has the manager and decides; in each worker's (`worker`)
it has the bytes and copies. They exchange `messages`. `connector` is the class that vLLM asks for;
`plugin` registers its name; `surface` lists all that is used of vLLM.
Cost: importing this package imports neither vLLM nor torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["KvtrieConnector"]  # pyright: ignore[reportUnsupportedDunderAll] - see below


def __getattr__(name: str) -> Any:  # noqa: ANN401 - a class that vLLM's own base makes
    if name == "KvtrieConnector":
        surface = import_module("kvtrie.engines.vllm.surface")
        check = import_module("kvtrie.engines.server.surface_check")
        version = str(import_module("vllm").__version__)
        return check.load_class(surface, version, "kvtrie.engines.vllm.connector", name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
