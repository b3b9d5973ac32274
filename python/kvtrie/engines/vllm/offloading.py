"""KvtrieOffloadingSpec: vLLM's `OffloadingConnector` over kvtrie's order of eviction and its disk.

`spec_name: "KvtrieOffloadingSpec"`, `spec_module_path: "kvtrie.engines.vllm.offloading"`. vLLM's
own manager of host memory evicts with `KvtrieCachePolicy`. `disk` adds a `KvtrieDiskTier` below.
vLLM has no copy kernels for CPUs, so copies there are plain torch copies.
Workers write the digest of their weights on a `Board`, and the disk tier reads it.
vLLM creates the scheduler's part after all workers have opened host memory. So the scheduler's part
removes the files of the board and, on CPUs, of this memory, and a crash leaves no files.
Invariant: on CPUs, copies into and out of vLLM's memory are done when submitted.
Cost: a copy per chunk and tensor.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from vllm.config import get_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvtrie.engines.server.boundary import Boundary
from kvtrie.engines.vllm.board import Board
from kvtrie.engines.vllm.weights import WorkerWeights
from kvtrie.errors import ConfigError
from kvtrie.settings.argument import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from vllm.config import VllmConfig
    from vllm.v1.kv_offload.base import (
        BlockIDsLoadStoreSpec,
        CanonicalKVCaches,
        GPULoadStoreSpec,
        LoadStoreSpec,
        OffloadingManager,
    )
    from vllm.v1.kv_offload.config import OffloadingConfig
    from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager

__all__ = ["KvtrieOffloadingSpec", "NamedWorker", "PlainWorker"]

_COUNTED = {
    "vllm:kvtrie_ignored_hints": "Hints of requests that were ignored",
    "vllm:kvtrie_contained_errors": "Errors that left a request without the cache",
}
_DISK_KEYS = ("path", "bytes", "blocks", "durability", "threads")


class KvtrieOffloadingSpec(TieringOffloadingSpec):
    """Host memory and, if `disk` is given, a folder below it.

    Args:
        config: vLLM's configuration. Its `extra_config` has `cpu_bytes_to_use`, and may have
            `disk`, with `path` and `bytes` or `blocks`.

    Raises:
        ConfigError: a disk with unknown keys or without a path.
    """

    def __init__(self, config: OffloadingConfig) -> None:
        extra = _with_tiers(config.extra_config)
        super().__init__(replace(config, extra_config=extra))
        self._plain: PlainWorker | None = None
        self._named: NamedWorker | None = None
        kinds = [str(tier.get("type")) for tier in extra.get("secondary_tiers", ())]
        self._boundaries: list[Boundary] | None = None
        self._disk = any(kind in ("KvtrieDiskTier", "kvtrie") for kind in kinds)

    def board(self) -> Board:
        """Open the board with the digests of this engine's weights."""
        return Board(self._engine_id, self.config.parallel.world_size)

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """Return the metrics of vLLM's tiers, and counts of ignored hints and contained errors."""
        named = super().build_metric_definitions(dict(_with_tiers(extra_config)))
        return named | {
            name: OffloadingCounterMetadata(documentation=meaning)
            for name, meaning in _COUNTED.items()
        }

    def get_manager(self) -> OffloadingManager:
        """Return vLLM's manager of chunks, with `_COUNTED` added to its statistics."""
        manager = cast("TieringOffloadingManager", super().get_manager())
        if self._boundaries is None:
            parts: list[object] = [manager.primary_tier._policy, *manager.secondary_tiers]  # noqa: SLF001 - vLLM has no other way to a policy
            owned = (getattr(part, "boundary", None) for part in parts)
            self._boundaries = [each for each in owned if isinstance(each, Boundary)]
            manager.get_stats = partial(_stats, manager.get_stats, self._boundaries, Counter())
            self._remove_names()
        return manager

    def _remove_names(self) -> None:
        """Unlink shared memory already opened by every process of the server."""
        region = self._scheduler_mmap
        if current_platform.is_cpu() and region is not None and not region._creator:  # noqa: SLF001 - a worker created it
            Path(region.mmap_path).unlink(missing_ok=True)
        if self._disk:  # it has read the digests of all workers
            self.board().close()

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Return the worker for copies between vLLM's memory and host memory.

        Raises:
            ConfigError: a disk with adapters, because a tier does not receive the adapter of a
                request. A disk with media, if their tensors are not sent to the scheduler's
                process. The canonical layout on CPUs.
        """
        if not self._disk:
            return self._copier(kv_caches)
        if self._named is None:
            layers = [name for group in self.config.groups for name in group.layer_names]
            config = get_current_vllm_config()
            _require_tensors_of_media(config)
            contexts = config.compilation_config.static_forward_context
            tensors = {name: contexts[name].kv_cache for name in layers if name in contexts}
            blocks = len(kv_caches.tensors[0].tensor)
            sizes = {
                name: group.tokens_per_block
                for group in self.config.groups
                for name in group.layer_names
            }
            weights = WorkerWeights(config, tensors, blocks, sizes)
            if weights.adapters is not None:
                raise ConfigError(
                    "a disk below vLLM's OffloadingConnector and LoRA adapters: vLLM names chunks "
                    "by the adapter's name only, so KV of an adapter that was trained again would "
                    "be found; use KvtrieConnector, or leave the disk out"
                )
            self._named = NamedWorker(
                self._copier(kv_caches),
                weights.digest,
                self.board(),
                self.config.parallel.rank,
            )
        return self._named

    def _copier(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if not current_platform.is_cpu():
            return super().get_worker(kv_caches)
        if self.config.canonical_layout:
            raise ConfigError(
                "canonical_layout on CPUs: chunks have the layout of vLLM's memory; leave it out"
            )
        if self._plain is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=0 if self.replicated_layout else self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._plain = PlainWorker(kv_caches, self.blocks_per_chunk, region)
        return self._plain


class NamedWorker(OffloadingWorker):
    """A worker with the digest of its weights on a board, updated at start and on request.

    Args:
        worker: makes the copies.
        identity: returns the digest of the worker's weights.
        board: the board for the digest.
        rank: the rank of this worker.
    """

    def __init__(
        self, worker: OffloadingWorker, identity: Callable[[], bytes], board: Board, rank: int
    ) -> None:
        self._inner, self._identity, self._board, self._rank = worker, identity, board, rank
        self._answered = -1
        self._answer()

    def _answer(self) -> None:
        question = self._board.question
        if question != self._answered:
            self._board.answer(self._rank, question, self._identity())
            self._answered = question

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        """Copy blocks to host memory."""
        return self._inner.submit_store(job_id, src_spec, dst_spec)

    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,  # noqa: FBT001, FBT002 - vLLM's signature
    ) -> bool:
        """Copy blocks out of host memory. vLLM passes `expedited` from 0.33 on."""
        if expedited:
            return self._inner.submit_load(job_id, src_spec, dst_spec, expedited=True)
        return self._inner.submit_load(job_id, src_spec, dst_spec)

    def get_finished(self) -> list[TransferResult]:
        """Return the finished jobs. vLLM calls this once per step."""
        self._answer()
        return self._inner.get_finished()

    def wait(self, job_ids: set[int]) -> None:
        """Wait for jobs."""
        self._inner.wait(job_ids)

    def shutdown(self) -> None:
        """Close host memory."""
        self._inner.shutdown()


class PlainWorker(OffloadingWorker):
    """Copies by indexing, for memory without copy kernels in vLLM.

    Args:
        kv_caches: vLLM's tensors, a row per block.
        blocks_per_chunk: contiguous blocks in host memory.
        region: host memory.
    """

    def __init__(
        self, kv_caches: CanonicalKVCaches, blocks_per_chunk: int, region: SharedOffloadRegion
    ) -> None:
        self._region, self._per_chunk = region, blocks_per_chunk
        self._gpu_pages = [
            each.tensor.view(torch.int8).view(-1, each.page_size_bytes)
            for each in kv_caches.tensors
        ]
        self._host_pages = [
            region.create_next_worker_view(each.shape[1] * blocks_per_chunk)
            for each in self._gpu_pages
        ]
        self._groups = kv_caches.group_data_refs
        self._done: list[TransferResult] = []

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        """Copy blocks to host memory."""
        for gpu_page, host_page in self._pages(src_spec, dst_spec):
            host_page.copy_(gpu_page)
        self._done.append(TransferResult(job_id, success=True))
        return True

    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,  # noqa: ARG002, FBT001, FBT002 - vLLM's signature
    ) -> bool:
        """Copy blocks out of host memory."""
        for gpu_page, host_page in self._pages(dst_spec, src_spec):
            gpu_page.copy_(host_page)
        self._done.append(TransferResult(job_id, success=True))
        return True

    def get_finished(self) -> list[TransferResult]:
        """Return all jobs submitted since the last call."""
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Do nothing: no job is in flight."""

    def shutdown(self) -> None:
        """Close host memory."""
        self._host_pages = []
        if not Path(self._region.mmap_path).exists():
            self._region._creator = False  # noqa: SLF001 - else vLLM reports its missing file
        self._region.cleanup()

    def _pages(
        self, blocks: GPULoadStoreSpec, chunks: LoadStoreSpec
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each page of the blocks, in vLLM's memory and in host memory.

        The first block of a group may be in the middle of its chunk. A block has pages only in the
        tensors of its group: elsewhere these bytes may belong to a different block.
        """
        spec = cast("BlockIDsLoadStoreSpec", chunks)
        ids, places = np.asarray(blocks.block_ids).tolist(), np.asarray(spec.block_ids).tolist()
        first = chunk = 0
        for refs, count, index in zip(
            self._groups, blocks.group_sizes, blocks.block_indices, strict=True
        ):
            part = index % self._per_chunk
            for at in range(count):
                whole, inside = divmod(part + at, self._per_chunk)
                for ref in refs:
                    gpu_pages, size = self._gpu_pages[ref.tensor_idx], ref.page_size_bytes
                    begin = inside * gpu_pages.shape[1]
                    host_chunk = self._host_pages[ref.tensor_idx][places[chunk + whole]]
                    yield gpu_pages[ids[first + at], :size], host_chunk[begin : begin + size]
            first += count
            chunk += -(-(part + count) // self._per_chunk) if count else 0


def _stats(
    vllms: Callable[[], OffloadingConnectorStats | None],
    boundaries: list[Boundary],
    before: Counter[str],
) -> OffloadingConnectorStats | None:
    """Return vLLM's statistics with the boundaries' counts since the last call."""
    stats = vllms()
    counts = (sum(each.hints for each in boundaries), sum(each.failures for each in boundaries))
    for name, count in zip(_COUNTED, counts, strict=True):
        if count > before[name]:
            stats = OffloadingConnectorStats() if stats is None else stats
            stats.increase_counter(name, count - before[name])
            before[name] = count
    return stats


def _require_tensors_of_media(config: VllmConfig) -> None:
    """Refuse a disk if vLLM's chunks would have media names chosen by clients."""
    media = config.model_config.multimodal_config
    shared = media is not None and media.mm_processor_cache_type == "shm"
    if shared or config.ec_transfer_config is not None:
        raise ConfigError(
            "a disk below vLLM's OffloadingConnector with "
            f"{'mm_processor_cache_type shm' if shared else 'ec_transfer_config'}: the tensors of "
            "images do not reach vLLM's scheduler, so their chunks would be named by values sent "
            "by clients; use KvtrieConnector, or leave the disk out"
        )


def _with_tiers(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration for vLLM's own tiers."""
    given = dict(extra)
    given.setdefault("eviction_policy", "KvtrieCachePolicy")
    given.setdefault("cache_policy_module_path", "kvtrie.engines.vllm.cache_policy")
    disk = given.pop("disk", None)
    if disk is not None:
        if unknown := [shown(key) for key in disk if key not in _DISK_KEYS]:
            raise ConfigError(f"disk has no {', '.join(unknown)}: {', '.join(_DISK_KEYS)}")
        if not disk.get("path"):
            raise ConfigError("a disk tier needs a path, the folder of its files")
        tier = {"type": "KvtrieDiskTier", "module_path": "kvtrie.engines.vllm.disk_tier"}
        given["secondary_tiers"] = [*given.get("secondary_tiers", ()), tier | disk]
    return given
