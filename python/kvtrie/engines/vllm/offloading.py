"""KvtrieOffloadingSpec: vLLM's `OffloadingConnector` over kvtrie's order of eviction and its disk.

`spec_name: "KvtrieOffloadingSpec"`, `spec_module_path: "kvtrie.engines.vllm.offloading"`. vLLM's
own manager of host memory decides with `KvtrieCachePolicy`; `disk` puts a `KvtrieDiskTier` below.
Where vLLM has no kernels for copies, on CPUs, plain ones are made.
Invariant: copies into and out of vLLM's memory have ended when they are submitted, on CPUs.
Cost: a copy per chunk and tensor.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvtrie.argument import shown
from kvtrie.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.v1.kv_offload.base import (
        BlockIDsLoadStoreSpec,
        CanonicalKVCaches,
        GPULoadStoreSpec,
        LoadStoreSpec,
    )
    from vllm.v1.kv_offload.config import OffloadingConfig

__all__ = ["KvtrieOffloadingSpec", "PlainWorker"]

_DISK_KEYS = ("path", "bytes", "blocks", "durability", "threads")


class KvtrieOffloadingSpec(TieringOffloadingSpec):
    """Host memory and, if `disk` is given, a folder below it.

    Args:
        config: vLLM's; its `extra_config` has `cpu_bytes_to_use`, and may have `disk`, with `path`
            and `bytes` or `blocks`.

    Raises:
        ConfigError: a disk with unknown keys or without a path.
    """

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(replace(config, extra_config=_with_tiers(config.extra_config)))
        self._worker: PlainWorker | None = None

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """Those of vLLM's tiers."""
        return super().build_metric_definitions(dict(_with_tiers(extra_config)))

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """What copies between vLLM's memory and the host's."""
        if not current_platform.is_cpu():
            return super().get_worker(kv_caches)
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=0 if self.replicated_layout else self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = PlainWorker(kv_caches, self.blocks_per_chunk, region)
        return self._worker


class PlainWorker(OffloadingWorker):
    """Copies by indexing, for memory that no kernel of vLLM copies.

    Args:
        kv_caches: vLLM's tensors, a row per block.
        blocks_per_chunk: blocks that lie together in host memory.
        region: host memory.
    """

    def __init__(
        self, kv_caches: CanonicalKVCaches, blocks_per_chunk: int, region: SharedOffloadRegion
    ) -> None:
        self._region, self._per_chunk = region, blocks_per_chunk
        self._here = [
            each.tensor.view(torch.int8).view(-1, each.page_size_bytes)
            for each in kv_caches.tensors
        ]
        self._there = [
            region.create_next_worker_view(each.shape[1] * blocks_per_chunk) for each in self._here
        ]
        self._done: list[TransferResult] = []

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        """Copy blocks to host memory."""
        for block, chunk, part in self._pairs(src_spec, dst_spec):
            for here, there in zip(self._here, self._there, strict=True):
                size = here.shape[1]
                there[chunk, part * size : (part + 1) * size] = here[block]
        self._done.append(TransferResult(job_id, success=True))
        return True

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        """Copy blocks out of host memory."""
        for block, chunk, part in self._pairs(dst_spec, src_spec):
            for here, there in zip(self._here, self._there, strict=True):
                size = here.shape[1]
                here[block] = there[chunk, part * size : (part + 1) * size]
        self._done.append(TransferResult(job_id, success=True))
        return True

    def get_finished(self) -> list[TransferResult]:
        """The jobs since the last call: all that were submitted."""
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Nothing: no job is under way."""

    def shutdown(self) -> None:
        """Give host memory back."""
        self._there = []
        self._region.cleanup()

    def _pairs(self, blocks: GPULoadStoreSpec, chunks: LoadStoreSpec) -> list[tuple[int, int, int]]:
        """For each block of vLLM's its chunk, and which part of that it is.

        The first block of a group may stand amid its chunk.
        """
        rows: list[tuple[int, int, int]] = []
        told = cast("BlockIDsLoadStoreSpec", chunks)
        ids, places = np.asarray(blocks.block_ids).tolist(), np.asarray(told.block_ids).tolist()
        first = chunk = 0
        for count, index in zip(blocks.group_sizes, blocks.block_indices, strict=True):
            part = index % self._per_chunk
            for at in range(count):
                whole, inside = divmod(part + at, self._per_chunk)
                rows.append((ids[first + at], places[chunk + whole], inside))
            first += count
            chunk += -(-(part + count) // self._per_chunk) if count else 0
        return rows


def _with_tiers(extra: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that vLLM's own tiers read."""
    told = dict(extra)
    told.setdefault("eviction_policy", "KvtrieCachePolicy")
    told.setdefault("cache_policy_module_path", "kvtrie.engines.vllm.cache_policy")
    disk = told.pop("disk", None)
    if disk is not None:
        if strange := [shown(key) for key in disk if key not in _DISK_KEYS]:
            raise ConfigError(f"disk has no {', '.join(strange)}: {', '.join(_DISK_KEYS)}")
        if not disk.get("path"):
            raise ConfigError("a disk tier needs a path, the folder of its files")
        tier = {"type": "KvtrieDiskTier", "module_path": "kvtrie.engines.vllm.disk_tier"}
        told["secondary_tiers"] = [*told.get("secondary_tiers", ()), tier | disk]
    return told
