"""LMCache 0.5.6, in-process and layer-wise: the books of one prompt, without bytes moved.

A cache of 32 layers in chunks of 256 tokens, 32 bytes per token and layer are reserved and none
written: the time is keys, locks and generators. The GPU connector does nothing.
Needs lmcache in this interpreter. Cost: half a minute, most of it imports.
"""

from __future__ import annotations

import argparse
import logging
import os
from time import perf_counter
from typing import TYPE_CHECKING, Any

os.environ |= {
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_LOG_LEVEL": "ERROR",
    "PYTHONHASHSEED": "0",
}
logging.disable(logging.WARNING)

import torch  # noqa: E402 - its settings come first
from lmcache.v1.cache_engine import LMCacheEngine, LMCacheEngineBuilder  # noqa: E402 - as torch
from lmcache.v1.config import LMCacheEngineConfig  # noqa: E402 - as torch
from lmcache.v1.gpu_connector.gpu_connectors import (  # noqa: E402 - as torch
    VLLMPagedMemLayerwiseGPUConnector,
)
from lmcache.v1.metadata import LMCacheMetadata  # noqa: E402 - as torch

from benches.measure import emit  # noqa: E402 - as torch
from benches.workload import SEED, VOCABULARY  # noqa: E402 - as torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PEER = "LMCache"
LAYERS, HIDDEN, CHUNK = 32, 8, 256


class Connector(VLLMPagedMemLayerwiseGPUConnector):
    """Keeps the generator protocol and copies nothing."""

    def __init__(self) -> None:
        self.num_layers = LAYERS

    def get_shape(self, num_tokens: int) -> torch.Size:
        """Shape of one layer's memory."""
        return torch.Size([num_tokens, 2, HIDDEN])

    def batched_from_gpu(self, *_: Any, **__: Any) -> Iterator[None]:
        """One step before the layers, one for each."""
        for _ in range(LAYERS + 1):
            yield

    def batched_to_gpu(self, *_: Any, **__: Any) -> Iterator[None]:
        """One step before the layers, one for each, one after them."""
        for _ in range(LAYERS + 2):
            yield


def new_engine() -> LMCacheEngine:
    """A layer-wise engine of one worker."""
    config = LMCacheEngineConfig.from_defaults(
        chunk_size=CHUNK, local_cpu=True, max_local_cpu_size=1.0, use_layerwise=True
    )
    metadata = LMCacheMetadata(
        model_name="model",
        world_size=1,
        local_world_size=1,
        worker_id=0,
        local_worker_id=0,
        kv_dtype=torch.bfloat16,
        kv_shape=(LAYERS, 2, CHUNK, 1, HIDDEN),
    )

    def nothing(data: Any, source: Any) -> None:
        """Broadcast among the workers: there is one."""

    engine = LMCacheEngineBuilder.get_or_create(
        "peer", config, metadata, Connector(), nothing, nothing
    )
    engine.post_init()
    return engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--seed", type=int, default=SEED)
    given = parser.parse_args()
    torch.manual_seed(given.seed)
    engine = new_engine()
    times: dict[str, list[float]] = {"store": [], "lookup": [], "retrieve": []}

    def timed(name: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        t = perf_counter()
        result = function(*args, **options)
        times[name].append(1e3 * (perf_counter() - t))
        return result

    for i in range(given.prompts):
        tokens = torch.randint(1, VOCABULARY, (given.tokens,)).tolist()
        timed("store", list, engine.store_layer(tokens))
        found = timed("lookup", engine.lookup, tokens, lookup_id=str(i), pin=True)
        assert found == given.tokens
        # Retrieving unpins, too.
        got = timed("retrieve", list, engine.retrieve_layer(tokens, sync=True))
        assert got[-1].all()
    for name, ms in times.items():
        context = {"tokens": given.tokens, "layers": LAYERS}
        context["median"] = round(sorted(ms)[len(ms) // 2], 2)
        emit(PEER, f"layerwise.{name}", min(ms), "ms", **context)
    os._exit(0)  # its threads would keep the process


if __name__ == "__main__":
    main()
