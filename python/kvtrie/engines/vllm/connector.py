"""KvtrieConnector: the connector class, created by vLLM in its scheduler and in each worker.

It only translates vLLM's calls into calls of a `SchedulerConnector` or a `WorkerConnector`. Names
used of vLLM are listed in `surface`.
Cost: attribute look-ups.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, cast

import vllm
from torch import distributed
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from kvtrie.engines.identity.weights import checkpoint_digest
from kvtrie.engines.server.control import Controlled, ControlSocket, control_path
from kvtrie.engines.server.format_figure import FormatFigure
from kvtrie.engines.vllm.data_parallel import part_of
from kvtrie.engines.vllm.kv_writer import writer_of
from kvtrie.engines.vllm.media import name_media
from kvtrie.engines.vllm.metrics import MetricsExporter
from kvtrie.engines.vllm.model import ServedModel
from kvtrie.engines.vllm.scheduler import SchedulerConnector
from kvtrie.engines.vllm.settings import Settings
from kvtrie.engines.vllm.start_line import log_start
from kvtrie.engines.vllm.vllm_events import EngineResets, EventGroup, VllmNaming, events_of
from kvtrie.engines.vllm.vllm_metrics import KvtrieProm, KvtrieStats
from kvtrie.engines.vllm.watch import pauses, watch
from kvtrie.engines.vllm.weights import WorkerWeights, combined
from kvtrie.engines.vllm.worker import WorkerConnector
from kvtrie.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvtrie.engines.vllm.messages import Opened, StepNews, StepOrders

__all__ = ["KvtrieConnector"]

_LOG = logging.getLogger("vllm.kvtrie")  # below vLLM's logger, for its handlers


class _Orders(KVConnectorMetadata):
    """Orders of a step, from the scheduler to the workers."""

    def __init__(self, orders: StepOrders) -> None:
        self.orders = orders


class _News(KVConnectorWorkerMetadata):
    """Reports of the workers after a step, by rank."""

    def __init__(self, news: dict[int, StepNews]) -> None:
        self.news = news

    def aggregate(self, other: _News) -> _News:  # pyright: ignore[reportIncompatibleMethodOverride] - vLLM passes the same class
        """Merge the reports of two groups of ranks."""
        return _News(self.news | other.news)


class _Handshake(KVConnectorHandshakeMetadata):
    """Tiers and weights of a worker, sent once at start."""

    def __init__(self, opened: Opened) -> None:
        self.opened = opened


class KvtrieConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps a server's KV in host memory and on disk. `docs/vllm.md` has the settings."""

    def __init__(self, vllm_config: VllmConfig, role: Any, kv_cache_config: KVCacheConfig) -> None:  # noqa: ANN401
        super().__init__(vllm_config, role, kv_cache_config)
        parallel = vllm_config.parallel_config
        self._settings = Settings.read(
            self._kv_transfer_config.kv_connector_extra_config,
            ranks=parallel.tensor_parallel_size * parallel.pipeline_parallel_size,
            part=part_of(self._kv_transfer_config.engine_id, parallel),
        )
        lasting = any(tier.outlives() for tier in self._settings.tiers or ())
        self._model = ServedModel.of(vllm_config, kv_cache_config, name_weights=lasting)
        self._model.require_served(self._settings)
        if self._model.resume is not None and not hasattr(
            KVConnectorBase_V1, "get_loaded_kv_cache_group_ids"
        ):
            raise ConfigError(
                f"the model has {len(self._model.groups)} groups of layers and vLLM is "
                f"{vllm.__version__}: 0.32 or later wanted"
            )
        self._scheduler: SchedulerConnector | None = None
        self._worker: WorkerConnector | None = None
        self._control: ControlSocket | None = None
        self._digest = b""  # of this worker's weights, at start
        groups = self._model.groups
        self._counts = MetricsExporter([group.number for group in groups])
        self._resets: EngineResets | None = None
        self._event_groups = [EventGroup.of(group, kv_cache_config) for group in groups]
        self._block_tokens: dict[str, int] = {
            name: group.kv_cache_spec.block_size
            for group in kv_cache_config.kv_cache_groups
            for name in group.layer_names
        }
        self._hashed: str = vllm_config.cache_config.prefix_caching_hash_algo
        self._microbatched: bool = vllm_config.parallel_config.use_ubatching

    @property
    def requires_kv_delivery(self) -> bool:
        """Return False: vLLM can recompute a block if its store fails."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Return whether loads are layerwise: layers wait only between the pieces of a graph."""
        return bool(extra_config.get("use_layerwise", extra_config.get("layerwise", False)))

    # ---------------------------------------------------------------------- the scheduler process

    @property
    def scheduler(self) -> SchedulerConnector:
        """The connector's part in the scheduler's process.

        Raises:
            ConfigError: not every worker has reported its tiers.
        """
        if self._scheduler is None:
            raise ConfigError("vLLM has not brought the workers' handshake to the scheduler")
        return self._scheduler

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Receive the workers' tiers, by pipeline stage and tensor-parallel rank."""
        wide, ranks = self._model.shape.tp, self._model.ranks
        opened = {stage * wide + rank: one.opened for (stage, rank), one in metadata.items()}
        if len(opened) != ranks:
            raise ConfigError(f"{len(opened)} of {ranks} workers have reported their tiers")
        weights = combined(opened[rank].weights for rank in sorted(opened))
        figures = self._format_figures()
        self._scheduler = SchedulerConnector(
            self._settings,
            self._model.with_weights(weights),
            opened,
            naming=VllmNaming(self._hashed, self._model.hashes) if self._settings.events else None,
        )
        self._scheduler.format_costs = figures
        log_start(
            self._settings,
            self._model,
            opened,
            self._scheduler.manager,
            figures=figures,
        )
        if self._settings.control is not None:
            self._control = self._open_control(self._settings.control, self._scheduler)
        watch(self)
        # A shared cache of encoder outputs looks them up by vLLM's names of inputs.
        if self._vllm_config.ec_transfer_config is None:
            name_media(self)

    def _format_figures(self) -> tuple[FormatFigure, ...]:
        model, load = self._vllm_config.model_config, self._vllm_config.load_config
        settings = self._settings
        tiers = {settings.format: "tiers below the GPU"}
        if settings.disk_format != settings.format:
            tiers[settings.disk_format] = "the disk"
        figures = [
            FormatFigure.read(
                name,
                settings.calibration,
                lambda: checkpoint_digest(model.model, model.revision, load.download_dir),
                max_kl=settings.max_kl,
                native_first=settings.native_first,
                native_last=settings.native_last,
                block_tokens=self._model.block_tokens,
                uncalibrated=settings.uncalibrated,
                tiers=where,
            )
            for name, where in tiers.items()
        ]
        return tuple(figure for figure in figures if figure is not None)

    def _open_control(self, path: str, scheduler: SchedulerConnector) -> ControlSocket:
        parallel = self._vllm_config.parallel_config
        rank = parallel.data_parallel_index
        several = bool(part_of(self._kv_transfer_config.engine_id, parallel))
        engine = Controlled(
            scheduler.manager,
            scheduler.why,
            scheduler.cache.counters.as_dict,
            {
                "tiers": {
                    kind: tier.slots for kind, tier in scheduler.manager.stats().tiers.items()
                },
                "why_min_tokens": self._settings.why_min_tokens,
                "why_per_second": self._settings.why_per_second,
                **_about_format(scheduler.format_costs),
            },
            scheduler.commands,
        )
        return ControlSocket(control_path(path, rank, several=several), engine)

    def request_weights_rehash(self) -> None:
        """Make the workers hash their weights again before any lookup or commit."""
        if self._scheduler is not None:
            self._scheduler.cache.identity.request_rehash()

    def request_adapters_rehash(self) -> None:
        """Make the workers hash their adapters before a request with an adapter is matched."""
        if self._scheduler is not None:
            self._scheduler.cache.identity.request_rehash(weights=False)

    def get_num_new_matched_tokens(
        self,
        request: Request,
        num_computed_tokens: int,
    ) -> tuple[int | None, bool]:
        """Return the tokens found after vLLM's own hit, and whether the request waits for them.

        A request waits with several groups of layers, because vLLM then accepts no report of a
        failed block. With a single group, loads precede the step reading them.
        """
        found = self.scheduler.match(request, num_computed_tokens)
        return found, bool(found) and len(self._model.groups) > 1

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:  # noqa: ARG002
        """Return the groups written by a load: vLLM need not zero their new blocks."""
        return tuple(group.number for group in self._model.groups)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Record the blocks allocated to a request, and start its loads."""
        tables = cast("tuple[list[int], ...]", blocks.get_block_ids())
        served = [tables[group.number] for group in self._model.groups]
        self.scheduler.admit(request, served, num_external_tokens)

    def get_external_cache_hit_sources(
        self,
        request: Request,
        num_external_tokens: int,
    ) -> dict[CacheHitSource, int]:
        """Return the tokens of a hit by tier. vLLM calls this from 0.32 on."""
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        host, disk, store = self.scheduler.sources(request.request_id, num_external_tokens)
        found = {
            CacheHitSource.HOST: host,
            CacheHitSource.DISK: disk,
            CacheHitSource.EXTERNAL_UNSPECIFIED: store,  # vLLM's name of a remote store
        }
        return {source: tokens for source, tokens in found.items() if tokens}

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> _Orders:
        """Return the orders of a step."""
        return _Orders(self.scheduler.orders(scheduler_output))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Receive the workers' reports of a step."""
        news = cast("_News | None", connector_output.kv_connector_worker_meta)
        if news is not None:
            self.scheduler.on_reports(news.news)

    def request_finished_all_groups(
        self,
        request: Request,
        block_ids: tuple[list[int], ...],  # noqa: ARG002
    ) -> tuple[bool, dict[str, Any] | None]:
        """End a request. vLLM may reuse its blocks at once.

        Returns:
            False, and the miss report for a request with a `why` hint, or None.
        """
        why = self.scheduler.end(request)
        if why is None:
            return False, None
        about = _about_format(self.scheduler.format_costs) if self._settings.why_clients else {}
        return False, {"kvtrie": {"why": why, **about}}

    def has_pending_push_work(self) -> bool:
        """Return whether stores or events need steps even if nothing is computed."""
        reset = self._resets is not None and self._resets.pending
        return reset or self.scheduler.busy

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Watch for resets of vLLM's cache, if events are published."""
        if self._settings.events:
            self._resets = EngineResets(gpu_block_pool)

    def reset_cache(self) -> bool:
        """Forget all blocks, or for a pause or a sleep only the blocks in vLLM's memory."""
        return self.scheduler.pause() if pauses() else self.scheduler.reset()

    def take_events(self) -> Iterable[Any]:
        """Return KV events of blocks stored or removed on host and disk since the last call."""
        forgotten = self._resets is not None and self._resets.take()
        changes = self.scheduler.changes(forgotten=forgotten)
        return events_of(changes, self._model, self._event_groups) if changes else ()

    def get_kv_connector_stats(self) -> KvtrieStats | None:
        """Return the scheduler's metrics at most once a second, or None. Workers have none."""
        counts = None if self._scheduler is None else self._scheduler.counts(self._counts)
        return None if counts is None else KvtrieStats(counts)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvtrieStats:
        """Build statistics from data of the scheduler's process."""
        return KvtrieStats(data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any, **kwargs: Any) -> KvtrieProm:  # noqa: ANN401 - vLLM's
        """Build the Prometheus metrics of a server."""
        return KvtrieProm(*args, **kwargs)

    # ------------------------------------------------------------------------- the worker process

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Open the tiers below vLLM's tensors."""
        from vllm.distributed.parallel_state import get_pp_group, get_tp_group

        device = next(iter(kv_caches.values())).device.type
        version = ".".join(vllm.__version__.split(".")[:2])
        stage, group = get_pp_group().rank_in_group, get_tp_group()
        self._rank = stage * self._model.shape.tp + group.rank_in_group

        def gather(value: Any) -> list[Any]:  # noqa: ANN401 - any message
            values: list[Any] = [None] * group.world_size
            distributed.all_gather_object(  # pyright: ignore[reportUnknownMemberType] - untyped
                values, value, group=group.cpu_group
            )
            return values

        weights = WorkerWeights(
            self._vllm_config, kv_caches, self._model.blocks, self._block_tokens
        )
        self._digest = weights.digest()
        stages: list[Any] = [gather(self._digest)]
        if self._model.stages > 1:
            stages = [None] * self._model.stages
            distributed.all_gather_object(  # pyright: ignore[reportUnknownMemberType] - untyped
                stages, gather(self._digest), group=get_pp_group().cpu_group
            )
        self._worker = WorkerConnector(
            self._settings,
            self._model.with_weights(combined(each for stage in stages for each in stage)),
            self._rank,
            kv_caches,
            engine=f"vllm {version} {device}",
            gather=gather,
            weights=weights.digest,
            adapters=weights.adapters,
            writer=writer_of(self._vllm_config),
        )

    def unregister_kv_caches(self) -> None:
        """End the copies before a sleep unmaps vLLM's memory. vLLM calls this from 0.33 on.

        The addresses stay valid.
        """
        if self._worker is not None:
            self._worker.drain()

    @property
    def _mine(self) -> WorkerConnector:
        if self._worker is None:
            raise ConfigError("vLLM has not registered its tensors")
        return self._worker

    def get_handshake_metadata(self) -> _Handshake:
        """Return this worker's tiers and the digest of its weights."""
        opened = self._mine.opened()
        opened.weights = self._digest
        return _Handshake(opened)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:  # noqa: ANN401 - vLLM's own
        """Copy out blocks before the step can overwrite them."""
        self._mine.store(kv_connector_metadata.orders)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:  # noqa: ANN401 - vLLM's own
        """Begin a step with its orders."""
        super().bind_connector_metadata(connector_metadata)
        self._mine.store(connector_metadata.orders)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ANN401, ARG002
        """Load the blocks read by the step."""
        self._mine.load()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Load the layer read next by the step."""
        self._mine.wait_for_layer(layer_name)

    def save_kv_layer(self, layer_name: str, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401, ARG002
        """Store the newly written blocks of a layer. Split batches are stored at the step's end."""
        if not self._microbatched:
            self._mine.save_layer(layer_name)

    def wait_for_save(self) -> None:
        """End the step's loads and stores."""
        self._mine.finish()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:  # noqa: ARG002
        """Return the requests with finished and with failed loads. From vLLM 0.32 on."""
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

        received, failed = self._mine.received()
        return KVConnectorTransferResults(finished_recving=received, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks with failed loads, of a model with a single group of layers."""
        bad = self._mine.bad_slots()
        return bad if len(self._model.groups) == 1 else set()

    def build_connector_worker_meta(self) -> _News:
        """Return this rank's reports of the step."""
        orders = cast("_Orders", self._get_connector_metadata()).orders
        return _News({self._rank: self._mine.news(idle=not orders.computes)})

    def shutdown(self) -> None:
        """End the threads, and close files and connections."""
        if self._worker is not None:
            self._worker.close()
        if self._control is not None:
            self._control.close()
        if self._scheduler is not None:
            self._scheduler.close()


def _about_format(figures: Sequence[FormatFigure]) -> dict[str, Any]:
    """Return the figures of the narrowest stored format: the last, if any."""
    return {"format": figures[-1].as_dict()} if figures else {}
