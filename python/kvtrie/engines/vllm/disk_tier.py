"""KvtrieDiskTier: kvtrie's disk below vLLM's CPU cache, as a secondary tier of vLLM's manager.

It runs in the scheduler's process, on separate threads. Chunks belong to the weights named by the
workers on the `Board`. After a possible change of weights, all lookups miss and all stores fail
until all workers have hashed their weights again. If the weights have changed, this lasts until
vLLM resets its cache, because its memory still has KV of the old weights.
Invariant: the files stay within their capacity. A chunk is verified before vLLM receives it, so a
damaged chunk is a miss.
Cost: a dictionary entry per chunk in flight. vLLM's step never waits.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from kvtrie.engines.server.boundary import Boundary
from kvtrie.engines.vllm.cache_policy import in_sequence
from kvtrie.engines.vllm.data_parallel import part_of
from kvtrie.engines.vllm.media import name_media
from kvtrie.engines.vllm.offloading import KvtrieOffloadingSpec
from kvtrie.engines.vllm.watch import watch
from kvtrie.engines.vllm.weights import combined
from kvtrie.errors import ConfigError
from kvtrie.settings.argument import folder, whole
from kvtrie.tiers.keyed_disk import KeyedDisk

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from concurrent.futures import Future

    from numpy.typing import NDArray
    from vllm.v1.kv_offload.base import ReqContext
    from vllm.v1.kv_offload.tiering.base import TransferJob
    from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

    _Row = NDArray[np.uint8]
    _Copy = Callable[[list[bytes], list[_Row], TransferJob, bytes], list[bool]]

__all__ = ["KvtrieDiskTier"]

_LOG = logging.getLogger("vllm.kvtrie")  # below vLLM's logger, for its handlers


class KvtrieDiskTier(SecondaryTierManager):
    """Chunks in the files of a folder, found again after a restart.

    Args:
        offloading_spec: vLLM's spec with the model's configuration.
        primary_kv_view: the chunks in host memory, a row each.
        tier_type: its name in the configuration.
        path: the folder of the files. A data-parallel rank uses `dp-RANK` below it.
        bytes: capacity of all files together, also as "200GB" or "25%" of the free disk space. Give
            either this or `blocks`.
        blocks: capacity in chunks.
        durability: the failures survived by a finished write, as in `Tier`.
        threads: the number of concurrent copies.
        backpressure_detector: vLLM's own.

    Attributes:
        boundary: counts requests with a failed lookup or an unrecorded use.

    Raises:
        ConfigError: no room for a chunk, a folder in use by a different process, or workers without
            named weights.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: TieringOffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        *,
        path: str,
        bytes: int | str | None = None,  # noqa: A002 - the name that `Tier` has for it
        blocks: int | None = None,
        durability: Any = "flush",  # noqa: ANN401 - checked by the store
        threads: int = 2,
        backpressure_detector: Any = None,  # noqa: ANN401 - vLLM's own
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        if not isinstance(offloading_spec, KvtrieOffloadingSpec):
            raise ConfigError(
                f"the disk tier is below {type(offloading_spec).__name__}, whose workers do not "
                "name their weights, so KV of other weights would be found: spec_name has to be "
                "KvtrieOffloadingSpec"
            )
        self._board = offloading_spec.board()
        digests = self._board.read()
        if digests is None:
            raise ConfigError("vLLM's workers have not named their weights on this machine")
        self.boundary = Boundary("kvtrie", _LOG)
        self._first = self._weights = combined(digests)
        self._weights_known = True  # whether the weights are known
        self._used = False  # whether requests came since vLLM's cache was empty
        self._off = False  # whether vLLM's cache may have KV of old weights
        self.locality = Locality.LOCAL
        self.disk = KeyedDisk(
            str(
                Path(folder("path of a disk tier", path), part_of(offloading_spec.config.engine_id))
            ),
            meaning=f"{_meaning(offloading_spec)} weights {self._first.hex()}",
            size=primary_kv_view.strides[0] if primary_kv_view.strides else 0,
            bytes=bytes,
            blocks=blocks,
            durability=durability,
        )
        if self.disk.read_only:
            reason = self.disk.store.refusal
            self.disk.close()
            raise ConfigError(f"the folder {path} of a disk tier cannot be written: {reason}")
        self._rows = np.asarray(primary_kv_view).view(np.uint8)
        self._threads = ThreadPoolExecutor(whole("threads", threads, 1, 64), "kvtrie-disk")
        self._lock = threading.Lock()
        self._under_way: set[Future[None]] = set()
        self._done: list[JobResult] = []
        self._coming: dict[bytes, int] = {}  # keys with unfinished stores
        self._events: list[OffloadingEvent] = []
        watch(self)
        name_media(self)

    def request_weights_rehash(self) -> None:
        """Stop lookups and stores until all workers have hashed their weights again."""
        with self._lock:
            self._board.ask()
            self._weights_known = False

    def request_adapters_rehash(self) -> None:
        """Do nothing: a disk tier refuses adapters."""

    def _serves(self) -> bool:
        """Return whether lookups and stores are allowed.

        From vLLM 0.33 on, its polling threads call this too, concurrently with
        `request_weights_rehash`.
        """
        with self._lock:
            if not self._weights_known and (digests := self._board.read()) is not None:
                self._weights_known = True
                if (now := combined(digests)) != self._weights:
                    self._weights, self._off = now, self._used
            return self._weights_known and not self._off

    def _key(self, key: bytes, weights: bytes | None = None) -> bytes:
        """Return a chunk's key under `weights`, by default the current weights.

        The weights at start are part of the folder's meaning instead.
        """
        weights = self._weights if weights is None else weights
        return key if weights == self._first else key + weights

    def lookup(self, key: bytes, req_context: ReqContext) -> LookupResult:
        """Return whether a chunk is on the disk."""
        self._used = True
        with self.boundary.contained(req_context.req_id):
            if not self._serves():
                return LookupResult.MISS
            if key in self._coming:
                return LookupResult.RETRY
            return LookupResult.HIT if self._key(key) in self.disk else LookupResult.MISS
        return LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Write chunks from host memory."""
        self._used = True
        if not self._serves():
            with self._lock:
                self._done.append(JobResult(job_metadata.job_id, success=False))
            return
        with self._lock:
            for key in job_metadata.keys:
                self._coming[key] = self._coming.get(key, 0) + 1
        self._begin(self._store, job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Read chunks into host memory and verify them."""
        self._begin(self._load, job_metadata)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return the jobs finished since the last call."""
        with self._lock:
            done, self._done = self._done, []
        return done

    def has_pending_work(self) -> bool:
        """Return whether jobs are running or unreported."""
        with self._lock:
            return bool(self._under_way or self._done)

    def touch(self, keys: Collection[bytes], req_context: ReqContext) -> None:
        """Record a use of chunks, in the order of their sequence."""
        with self.boundary.contained(req_context.req_id):
            if self._serves():
                self.disk.use(map(self._key, in_sequence(keys, req_context)))

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:  # noqa: ARG002
        """Return the default context: chunks may be loaded singly."""
        return RequestOffloadingContext()

    def drain_jobs(self) -> None:
        """Wait until no copy uses host memory. vLLM then empties its cache."""
        wait(list(self._under_way))
        self._used = self._off = False

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return the chunks stored since the last call, as events."""
        with self._lock:
            events, self._events = self._events, []
        return events

    def shutdown(self) -> None:
        """End the threads and close the folder."""
        self._threads.shutdown()
        self.disk.close()
        self._board.close()

    def _begin(self, copy: _Copy, job: TransferJob) -> None:
        future = self._threads.submit(self._run, copy, job, self._weights)
        with self._lock:
            self._under_way.add(future)
        future.add_done_callback(self._end)

    def _end(self, future: Future[None]) -> None:
        with self._lock:
            self._under_way.discard(future)

    def _run(self, copy: _Copy, job: TransferJob, weights: bytes) -> None:
        begun, keys = time.monotonic(), in_sequence(job.keys, job.req_context)
        well: list[bytes] = []
        try:
            places = dict(zip(job.keys, job.chunk_ids, strict=True))
            results = copy(keys, [self._rows[places[key]] for key in keys], job, weights)
            well = [key for key, good in zip(keys, results, strict=True) if good]
        finally:
            result = JobResult(
                job.job_id,
                success=len(well) == len(keys),
                successful_keys=well,
                transfer_time=time.monotonic() - begun,
                transfer_bytes=len(well) * self.block_size_bytes,
            )
            with self._lock:
                self._done.append(result)

    def _store(
        self,
        keys: list[bytes],
        rows: list[_Row],
        job: TransferJob,  # noqa: ARG002
        weights: bytes,
    ) -> list[bool]:
        try:
            results = self.disk.write_many(
                [(self._key(key, weights), row) for key, row in zip(keys, rows, strict=True)]
            )
        finally:
            with self._lock:
                for key in keys:
                    self._coming[key] -= 1
                    if not self._coming[key]:
                        del self._coming[key]
        stored = [key for key, good in zip(keys, results, strict=True) if good]
        if stored:
            event = OffloadingEvent(
                stored, Medium.STORAGE, removed=False
            )  # routers drop `locality`
            with self._lock:
                self._events.append(event)
        return results

    def _load(
        self,
        keys: list[bytes],
        rows: list[_Row],
        job: TransferJob,  # noqa: ARG002
        weights: bytes,
    ) -> list[bool]:
        return self.disk.read_many(
            [(self._key(key, weights), row) for key, row in zip(keys, rows, strict=True)]
        )


def _meaning(spec: TieringOffloadingSpec) -> str:
    """Return the format of a chunk's bytes.

    vLLM's keys cover tokens and salt, and the board covers the model.
    """
    config = spec.config
    parallel = config.parallel
    ranks = (parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size)
    layers = [group.layer_names for group in config.groups]
    return (
        f"vllm {config.model.dtype} {config.kv_cache_layout} ranks {ranks} "
        f"layers {layers} blocks {config.cache.blocks_per_chunk} of "
        f"{[group.tokens_per_block for group in config.groups]} "
        f"canonical {config.canonical_layout} replicated {spec.replicated_layout}"
    )
