"""Host memory of a worker: a private pool, a pool shared by ranks, or a persistent file.

With `keep` the worker itself copies between vLLM's memory and the pool. So it marks the blocks it
writes in the file, and verifies blocks of an earlier server on a separate thread.
Invariant: a block is marked before its first byte is copied, and can be sealed only after its
report is due (on a GPU after the copy's event). Cost: a few microseconds per block.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvtrie.errors import KvtrieError
from kvtrie.tiers import KeptPool, Pool
from kvtrie.tiers.kept_file import open_kept_memory
from kvtrie.tiers.kept_tier import kept_pool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch
    from numpy.typing import NDArray

    from kvtrie import Moves
    from kvtrie.engines.vllm.messages import Place, StepNews
    from kvtrie.engines.vllm.model import ServedModel
    from kvtrie.engines.vllm.replicated import ReplicatedRanks
    from kvtrie.engines.vllm.shared_memory import SharedMemory
    from kvtrie.model.layout import Layout
    from kvtrie.settings.tier import Tier
    from kvtrie.transfer.report import MoveReport

__all__ = ["HostMemory", "KeptStores", "open_host"]


class HostMemory(NamedTuple):
    """A worker's host tier.

    Attributes:
        pool: the memory.
        shared: the memory shared by ranks without a file, or None.
        writes_all: whether a single rank writes all blocks of a shared pool, because a kept file
            has a single writer process.
    """

    pool: Pool
    shared: SharedMemory | None = None
    writes_all: bool = False


def open_host(
    tier: Tier,
    model: ServedModel,
    blocks: int,
    layout: Layout,
    *,
    rank: int,
    replicas: ReplicatedRanks,
    gather: Callable[[Any], list[Any]] | None,
    pinned: bool,
    wall: Callable[[], int],
) -> HostMemory:
    """Open the memory of a host tier.

    Args:
        tier: its settings.
        model: the served KV.
        blocks: the blocks of all sharing ranks, or the bytes with several groups of layers.
        layout: layout of a layer of a block.
        rank: the rank, among all ranks with a part of the KV.
        replicas: the ranks sharing the memory.
        gather: exchanges values with the ranks of the tensor-parallel group.
        pinned: whether to register the memory with CUDA.
        wall: the wall clock in nanoseconds.

    Raises:
        ConfigError: no room, or an unusable file at `keep`.
    """
    size, memory = model.block_tokens, None
    own, separate_groups = model.budget(tier, blocks), model.resume is not None
    together = gather is not None and replicas.count > 1
    if tier.keep is not None:
        kept = None
        if replicas.place == 0:
            kept = kept_pool(
                model.shape, own, size, layout=layout, rank=rank, ranks=model.ranks,
                pinned=pinned, clock=wall, separate_groups=separate_groups,
            )  # fmt: skip
        if gather is not None and together:
            addresses = gather(None if kept is None else kept.address)
            where: tuple[int, int, int] | None = addresses[replicas.first]
            if kept is None and where is not None:
                memory = open_kept_memory(*where, blocks * model.shape.block_bytes(size))
        if kept is not None:
            return HostMemory(kept, writes_all=together)
        if memory is not None:
            return HostMemory(_pool(model, blocks, layout, memory, pinned=pinned), writes_all=True)
    if separate_groups:
        return HostMemory(
            Pool.of_tier(model.shape, own, size, device="cpu", pinned=pinned, separate_groups=True)
        )
    shared = None
    if gather is not None and together:
        shared = replicas.share(blocks * model.shape.block_bytes(size), gather)
        memory = shared.bytes
    return HostMemory(_pool(model, blocks, layout, memory, pinned=pinned), shared)


def _pool(
    model: ServedModel, blocks: int, layout: Layout, memory: torch.Tensor | None, *, pinned: bool
) -> Pool:
    return Pool(
        model.shape, blocks, model.block_tokens, layout=layout, pinned=pinned, memory=memory
    )


class HostVerification:
    """Verification of blocks in host memory for the scheduler.

    Args:
        kept: the kept memory of this worker, or None: then there is nothing to verify.
        reports: whether the scheduler counts this worker's kept blocks.
    """

    def __init__(self, kept: KeptStores | None, *, reports: bool) -> None:
        self._kept, self._reports = kept, reports
        self._unasked: dict[Place, bool] = {}
        self.pending = 0

    def ask(self, questions: list[tuple[Place, bytes]]) -> None:
        """Start to verify blocks. Without kept memory they count as verified."""
        self.pending += len(questions)
        if self._kept is not None:
            self._kept.start_verification(questions)
        else:
            self._unasked.update((place, True) for place, _ in questions)

    def answer(self, news: StepNews) -> None:
        """Add the results of verifications and the counts of kept memory."""
        if self._kept is None:
            news.verified, self._unasked = self._unasked, {}
            news.kept = 0 if self._reports else None
        else:
            news.verified, news.lost = self._kept.verified(), dict(self._kept.pool.lost_blocks)
            news.kept = self._kept.pool.kept_blocks
        self.pending -= len(news.verified)


class _Copy(NamedTuple):
    """A block being copied into a kept pool."""

    group: int
    slot: int
    key: bytes
    label: bytes


class KeptStores:
    """A worker's copies into a kept pool, and the verification of its earlier blocks.

    Args:
        pool: the pool.
        news: called after a verification.
    """

    def __init__(self, pool: KeptPool, news: Callable[[], object]) -> None:
        self.pool = pool
        self._news = news
        self._under_way: dict[int, _Copy] = {}
        self._threads = ThreadPoolExecutor(1, "kvtrie-verify")
        self._verified: SimpleQueue[tuple[Place, bool]] = SimpleQueue()

    def begin(self, moves: Moves) -> dict[int, str]:
        """Mark blocks before they are copied. Return the refused rows with the reason."""
        failed: dict[int, str] = {}
        for group, rows in self._groups(moves):
            part, some = self.pool.groups[group], moves[rows]
            keys, labels = [key.tobytes() for key in some.key], some.label
            why = part.begin(some.dst_slot.astype(np.int64), keys, (0, part.layers))
            failed |= {int(rows[at]): reason for at, reason in why.items()}
            slots = some.dst_slot.tolist()
            for at, ident in enumerate(some.id.tolist()):
                if at not in why:
                    self._under_way[ident] = _Copy(group, slots[at], keys[at], labels[at])
        return failed

    def verify_sources(self, moves: Moves) -> dict[int, str]:
        """Verify blocks before they are loaded. Return the invalid rows with the reason."""
        failed: dict[int, str] = {}
        for group, rows in self._groups(moves):
            part, some = self.pool.groups[group], moves[rows]
            if not part.file.unverified and not part.file.lost:
                continue
            keys = [key.tobytes() for key in some.key]
            why = part.verify(some.src_slot.astype(np.int64), keys)
            failed |= {int(rows[at]): reason for at, reason in why.items()}
        return failed

    def _groups(self, moves: Moves) -> list[tuple[int, NDArray[np.intp]]]:
        """Return the rows of moves by group of layers."""
        groups: list[int] = np.unique(moves.group).tolist()
        return [(group, np.flatnonzero(moves.group == group)) for group in groups]

    def record_reports(self, reports: Iterable[MoveReport]) -> bool:
        """Record the newly reported copies. Return whether any block can be sealed."""
        for report in reports:
            ended = [self._under_way.pop(i) for i in report.ids if i in self._under_way]
            for group in {one.group for one in ended}:
                _, slots, keys, labels = zip(
                    *(one for one in ended if one.group == group), strict=True
                )
                part = self.pool.groups[group]
                part.finish(np.asarray(slots), keys, labels, ok=report.ok)
        return any(part.sealable for part in self.pool.groups)

    def start_verification(self, questions: Sequence[tuple[Place, bytes]]) -> None:
        """Verify blocks on the verification thread. `verified` returns the results."""
        if questions:
            self._threads.submit(self._verify, list(questions))

    def verified(self) -> dict[Place, bool]:
        """Return the new results since the last call: by place, whether its block is valid."""
        return dict(self._verified.get() for _ in range(self._verified.qsize()))

    def _verify(self, questions: Sequence[tuple[Place, bytes]]) -> None:
        for (group, slot), key in questions:
            try:
                good = not self.pool.groups[group].verify(np.array([slot]), [key])
            except KvtrieError:  # the server ends
                good = False
            self._verified.put(((group, slot), good))
        self._news()

    def close(self) -> None:
        """Wait for a running verification, seal the copied blocks, and close the file."""
        self._threads.shutdown(cancel_futures=True)
        self.pool.close()
