"""WorkerConnector: the bytes of a rank inside a vLLM worker. It decides nothing.

`StepCopies` loads blocks before a step reads them, all at once or layer by layer. It stores the
blocks filled by a step after each layer or at the step's end, and blocks of earlier steps before
the step writes. Concurrently, the threads of a `Runner` copy between host memory and disk or a
shared store, and an `AgeWriter` writes the ages of blocks.
Invariant: every move is reported once, done or failed. Cost: a copy per stored or loaded block, and
nothing in steps without copies.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtrie import Index, Moves
from kvtrie.engines.vllm.age_writer import AgeWriter
from kvtrie.engines.vllm.engine_memory import engine_memory
from kvtrie.engines.vllm.held_adapters import RankIdentity
from kvtrie.engines.vllm.kept_host import HostVerification, KeptStores, open_host
from kvtrie.engines.vllm.messages import Opened, StepNews
from kvtrie.engines.vllm.rank_reports import RankReports
from kvtrie.engines.vllm.rank_store import RankStore
from kvtrie.engines.vllm.replicated import ReplicatedRanks
from kvtrie.engines.vllm.step_copies import StepCopies
from kvtrie.errors import ConfigError
from kvtrie.settings.sizes import free_memory
from kvtrie.settings.tier import Tier
from kvtrie.tiers import DiskStorage, EnginePool, KeptPool, Pool
from kvtrie.transfer.copy_stream import CopyStream
from kvtrie.transfer.report import MoveReport
from kvtrie.transfer.runner import Runner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import torch
    from numpy.typing import NDArray

    from kvtrie.engines.vllm.held_adapters import HeldAdapters
    from kvtrie.engines.vllm.kv_writer import Writer
    from kvtrie.engines.vllm.messages import IndexRow, StepOrders
    from kvtrie.engines.vllm.model import ServedModel
    from kvtrie.engines.vllm.settings import Settings
    from kvtrie.tiers import Storage
    from kvtrie.transfer.report import Progress

__all__ = ["WorkerConnector"]

_IDLE_S = 0.002  # wait for reports in a step without computation, so as not to spin
_HUNG_S = 0.02  # longer wait if all remaining copies hang


class WorkerConnector:
    """A rank's tiers and the copies between them.

    Args:
        settings: the operator's settings.
        model: the served KV.
        rank: the rank, among all ranks with a part of the KV.
        tensors: vLLM's tensors by layer name.
        engine: the engine's name, version and kind of memory, a part of the name of block bytes.
        gather: exchanges values with the ranks of its tensor-parallel group. With it, latent KV is
            stored once for the ranks of a machine.
        weights: returns the digest of the rank's current weights.
        adapters: the rank's adapters, or None if its models take none.
        writer: returns the kernel for writing tokens into the tensor of a layer, needed for tiers
            in a different format.
        runners: threads for copies to and from a disk.
        stream: creates the streams of loads and of stores.
        wall: the wall clock in nanoseconds, for block ages between two servers.

    Raises:
        ConfigError: tensors of an unexpected shape, tiers too small for a block, or a format of
            tiers below KV of an unknown layout.
    """

    def __init__(
        self,
        settings: Settings,
        model: ServedModel,
        rank: int,
        tensors: Mapping[str, torch.Tensor],
        *,
        engine: str,
        gather: Callable[[Any], list[Any]] | None = None,
        weights: Callable[[], bytes] = bytes,
        adapters: HeldAdapters | None = None,
        writer: Writer | None = None,
        runners: int = 2,
        stream: Callable[[torch.device], CopyStream] = CopyStream,
        wall: Callable[[], int] = time.time_ns,
    ) -> None:
        tiers = settings.tiers or (_default(model),)
        self.gpu = engine_memory(settings, model, tensors, engine, writer)
        gather_replicated = gather if model.replicated and model.shape.tp > 1 else None
        self.replicas = ReplicatedRanks.of(rank % model.shape.tp, gather_replicated)
        each = [model.room(tier) for tier in tiers]
        self._rooms = [room * self.replicas.count for room in each]
        self.host, self._shared, self._one_writes = open_host(
            tiers[0],
            model,
            self._rooms[0],
            tiers[0].layout or self.gpu.layout,
            rank=rank,
            replicas=self.replicas,
            gather=gather,
            pinned=self.gpu.device.type == "cuda",
            wall=wall,
        )
        self._news = threading.Event()
        self._kept: KeptStores | None = None
        if isinstance(self.host, KeptPool):
            self._kept = KeptStores(self.host, self._news.set)
        self._verification: HostVerification | None = None
        if tiers[0].keep is not None:
            self._verification = HostVerification(self._kept, reports=not self._one_writes)
        below = () if self.replicas.place else zip(tiers[1:], self._rooms[1:], strict=True)
        self.disk, self.remote = _open_below(below, model, self.host, rank, wall=wall)
        stores = (self.disk, None if self.remote is None else self.remote.storage)
        below_gpu = (self.host, *(store for store in stores if store is not None))
        lasting = (self.disk, None if self._kept is None else self._kept.pool)
        self._ages = [
            None if tier is None else AgeWriter(tier, settings.deadline_s) for tier in lasting
        ]
        workers = runners if self.disk is not None else 1
        self.runner = _runner(
            settings, self.gpu, below_gpu, tiers, workers=workers, progress=self._on_progress
        )
        self._slots = model.blocks
        self._identity = RankIdentity(rank, weights, adapters)
        self._layerwise = settings.use_layerwise
        self._layer_of, places = _places(model)
        self._step = -1
        load, store = stream(self.gpu.device), stream(self.gpu.device)
        self._copies = StepCopies(self.gpu, self.host, load, store, places)
        self._reports = RankReports()

    def opened(self) -> Opened:
        """Return the tiers and weights for the scheduler, before the first request."""
        layers = [pool.layers for pool in self.gpu.groups]
        opened = Opened(self._rooms, layers, pinned=self.gpu.device.type == "cuda")
        if self._kept is not None:
            opened.kept_rows = self._whole(self._kept.pool.recall())
        elif self._verification is not None and not (self._one_writes and self.replicas.place):
            opened.kept_rows = []  # the file is in use by a different process
        if self.disk is not None:
            opened.rows = self._whole(self.disk.recall())
            opened.others = self.disk.other_blocks()
        if self.remote is not None:
            opened.names = self.remote.names
        return opened

    def _whole(self, index: Index) -> list[IndexRow]:
        layers = [pool.layers for pool in self.gpu.groups]
        return [row for row in index if row[2:4] == (0, layers[row[4] if len(row) > 4 else 0])]  # noqa: PLR2004 - a row of a group after the first has its number

    def store(self, orders: StepOrders) -> None:
        """Begin a step: execute its orders, with stores before the step writes anything.

        Repeated calls in a step do nothing.
        """
        if orders.step == self._step:
            return
        self._step = orders.step
        self._identity.ask(orders)
        for group, pages in orders.pages.items():
            self.gpu.groups[group].set_pages(pages)
        self._copies.begin(orders.lost)
        self._reports.expect(orders.receive, orders.unreceived)
        for data in orders.ahead:
            self._copies.store_ahead(self._own(Moves.from_bytes(data)))
        if orders.forget:
            self._forget()
        for ages, used in zip(self._ages, (orders.used, orders.used_host), strict=True):
            if ages is not None:
                ages.write(used)
        if self._verification is not None:
            self._verification.ask(orders.verify)
        for data in orders.moves:
            self._start(self._own(Moves.from_bytes(data)))
        if orders.taken_back:
            self._copies.await_stores()

    def _start(self, moves: Moves) -> None:
        out: NDArray[np.bool_] = moves.src == 0
        into: NDArray[np.bool_] = moves.dst == 0
        if out.any():
            self._copies.store(self._admitted(moves[out], KeptStores.begin))
        if into.any():
            self._copies.load(self._admitted(moves[into], KeptStores.verify_sources))
        if not (out | into).all():
            self.runner.submit(moves[~(out | into)])

    def load(self) -> None:
        """Issue the loads of the step, or with `use_layerwise` only the first layers."""
        for slots, request in self._identity.of_others():
            self._reports.fail(request)
            for slot in slots:
                self._copies.fail(slot)
        if self._layerwise:
            self._copies.start_loads()
        else:
            self._copies.finish_loads()

    def wait_for_layer(self, name: str) -> None:
        """Wait until a layer's blocks are in vLLM's memory, before the layer reads them."""
        self._copies.wait_for_layer(self._layer_of.get(name, self.gpu.layers - 1))

    def save_layer(self, name: str) -> None:
        """Store a newly written layer of the blocks filled by the step."""
        self._copies.save_layer(self._layer_of.get(name))

    def finish(self) -> None:
        """End the step: copy the remaining layers of its loads and stores."""
        self._copies.finish()

    def bad_slots(self) -> set[int]:
        """Return the slots of vLLM's memory with failed loads since the last call."""
        return {slot % self._slots for slot in self._copies.bad_slots()}

    def received(self) -> tuple[set[str], set[str]]:
        """Return the requests with all loads finished since the last call, and the failures."""
        self._reports.add(self._copies.reports(wait=False))
        return self._reports.received()

    def news(self, *, idle: bool) -> StepNews:
        """Return the reports since the last step.

        Args:
            idle: the step has computed nothing, so the call may briefly wait for reports.
        """
        self._reports.add(self._copies.reports(wait=idle))
        reports = self._reports.take()
        if self._kept is not None and self._kept.record_reports(reports):
            self.runner.wake()
        verifying = self._verification is not None and self._verification.pending
        if idle and (self.runner.pending or verifying) and not reports:
            self._news.wait(_HUNG_S if self.runner.hangs and not verifying else _IDLE_S)
        self._news.clear()
        reports += self.runner.reports()
        news = StepNews(self._step, MoveReport.to_bytes(reports) if reports else b"")
        self._identity.answer(news)
        if self._verification is not None:
            self._verification.answer(news)
        if self.remote is not None:
            news.unstored = self.remote.lost()
        return news

    def drain(self) -> None:
        """Block until no copy reads or writes vLLM's memory."""
        self._copies.drain()

    def close(self) -> None:
        """Finish running copies, and close memory and files. Repeated calls do nothing."""
        self._copies.drain()
        self.runner.close()
        for ages in self._ages:
            if ages is not None:
                ages.close()
        if self._kept is not None:
            self._kept.close()
        if self.disk is not None:
            self.disk.close()
        if self.remote is not None:
            self.remote.storage.close()
        self.host.close()
        if self._shared is not None:
            self._shared.close()
            self._shared = None

    def _admitted(
        self, moves: Moves, check: Callable[[KeptStores, Moves], dict[int, str]]
    ) -> Moves:
        """Return the moves admitted by kept host memory, and report the rest as failed."""
        failed = {} if self._kept is None else check(self._kept, moves)
        for at, why in failed.items():
            self._reports.add([MoveReport((int(moves.id[at]),), error=why)])
            if moves.dst[at] == 0:
                self._copies.fail(int(moves.dst_slot[at]))
        return moves if not failed else moves[np.delete(np.arange(len(moves)), [*failed])]

    def _own(self, moves: Moves) -> Moves:
        """Return the moves of this rank with all its layers, and report the rest as done."""
        own = np.ones(len(moves), dtype=np.bool_)
        if self.replicas.count > 1:
            into: NDArray[np.bool_] = moves.dst == 0
            out: NDArray[np.bool_] = moves.src == 0
            stores = self.replicas.stores(moves.dst_slot)
            if self._one_writes:
                stores = np.full(len(moves), self.replicas.place == 0)
            own = into | (out & stores)
            if self.disk is not None or self.remote is not None:
                own |= ~(into | out)
        if self.remote is not None and not self.remote.writes:
            own &= moves.dst != len(self.runner.pools) - 1
        if not own.all():
            self._reports.add([MoveReport(tuple(moves[~own].id.tolist()))])
            moves = moves[own]
        return moves.of_layers(self.gpu.layers) if len(self.gpu.groups) == 1 else moves

    def _forget(self) -> None:
        if self.disk is not None:
            self.disk.keep(Index())
        if self._kept is not None:
            self._kept.pool.forget()
        if self.remote is not None:
            self.remote.storage.forget()

    def _on_progress(self, _progress: Progress) -> None:
        self._news.set()


def _places(model: ServedModel) -> tuple[dict[str, int], list[list[int]]]:
    """Return the places of KV layers in the order of computation, by name and by group.

    vLLM does not call the connector for layers with a state.
    """
    names = list(model.layer_names)
    states = [group.kind == "state" for group in model.shape.groups] or [False]
    if len(model.groups) > 1:
        kept = zip(model.groups, states, strict=True)
        names = [name for group, state in kept if not state for name in group.names]
        names.sort(key=_layer_number)
    place = {name: at for at, name in enumerate(names)}
    return place, [[place.get(name, -1) for name in group.names] for group in model.groups]


def _layer_number(name: str) -> int:
    """Return the number of a layer, the first number in vLLM's name."""
    return next((int(part) for part in name.split(".") if part.isdigit()), 0)


def _default(model: ServedModel) -> Tier:
    """Return a host tier with a quarter of the free memory, divided by the number of ranks."""
    free = free_memory() // 4 // model.ranks
    return Tier("host", bytes=max(free, 1))


def _runner(
    settings: Settings,
    gpu: EnginePool,
    pools: Sequence[Pool | Storage],
    tiers: Sequence[Tier],
    *,
    workers: int,
    progress: Callable[[Progress], None],
) -> Runner:
    return Runner(
        (gpu, *pools),
        tiers=(Tier("gpu", blocks=gpu.blocks, owner="engine"), *tiers)[: 1 + len(pools)],
        workers=workers,
        deadline_s=settings.deadline_s,
        layers_per_report=gpu.layers,
        progress=progress,
    )


def _open_below(
    tiers: Iterable[tuple[Tier, int]],
    model: ServedModel,
    host: Pool,
    rank: int,
    *,
    wall: Callable[[], int],
) -> tuple[DiskStorage | None, RankStore | None]:
    """Open the disk and the shared store among tiers with their capacity in blocks."""
    disk, remote = None, None
    # Open the disk last: opening with a smaller budget frees blocks at once.
    for tier, room in sorted(tiers, key=lambda row: row[0].kind == "disk"):
        if tier.kind != "disk":
            layout = host.layout if model.resume is None else tier.layout
            remote = RankStore(tier, model, layout, rank)
            continue
        try:
            disk = _disk(tier, room, model, host, rank, wall=wall)
        except BaseException:
            if remote is not None:
                remote.storage.close()
            raise
    return disk, remote


def _disk(
    tier: Tier, blocks: int, model: ServedModel, pool: Pool, rank: int, *, wall: Callable[[], int]
) -> DiskStorage:
    shape, size = model.shape, model.block_tokens
    if model.resume is not None:
        own = model.budget(tier, blocks)
        disk = DiskStorage.of_tier(
            shape, own, size, rank=rank, ranks=model.ranks, clock=wall, separate_groups=True
        )
    else:
        disk = DiskStorage(
            tier.path or "",
            shape,
            blocks,
            size,
            layout=tier.layout or pool.layout,
            above=pool.block_format,
            durability=tier.durability,
            io=tier.io,
            rank=rank,
            clock=wall,
        )
    if disk.read_only:
        reason = disk.store.refusal
        disk.close()
        raise ConfigError(f"the folder {tier.path} of a disk tier cannot be written: {reason}")
    return disk
