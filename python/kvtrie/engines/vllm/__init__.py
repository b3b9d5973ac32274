"""vLLM: a KV connector for keeping a server's KV in host memory and on disk.

```text
connector --> scheduler --> matching, admission --> misses      decisions about requests
    |             +--> orders, reports --> messages              and about each step
    |             |      +--> commits, loads --> requests --> waiting, running, hints, scope
    |             |                                  +--> sequence --> native_first
    |             +--> cache --> store_moves, store_client, events, metrics, restored
    |             +--> versions                         KV of older weights
    +--> worker --> kv_writer --> learned_views        bytes in vLLM's layout
    |       +--> rank_store, replicated --> shared_memory, kept_host, age_writer
    |       +--> step_copies --> device_reports
    +--> weights --> held_adapters, layout_check, start_options --> excluded      stored KV's name
disk_tier --> offloading --> board      vLLM's own offloading with our disk below
surface --> calls                                     the names and calls used of vLLM
connector, disk_tier --> data_parallel            a rank's part of a disk
middleware --> prompt_lengths --> asgi      hints of HTTP requests, in the HTTP server's process
    +--> served_settings
```

The scheduler's process (`scheduler`) has the manager and decides. Each worker process (`worker`)
has the bytes and copies them. They exchange `messages`. vLLM creates the class in `connector`,
`plugin` registers its name, and `surface` lists every name used of vLLM.
Cost: importing this package imports neither vLLM nor torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["KvtrieConnector"]  # pyright: ignore[reportUnsupportedDunderAll] - see below


def __getattr__(name: str) -> Any:  # noqa: ANN401 - a class with a base of vLLM
    if name == "KvtrieConnector":
        surface = import_module("kvtrie.engines.vllm.surface")
        check = import_module("kvtrie.engines.server.surface_check")
        version = str(import_module("vllm").__version__)
        return check.load_class(surface, version, "kvtrie.engines.vllm.connector", name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
