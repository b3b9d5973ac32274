"""RemoteStores: limits the number of stores begun on a shared remote tier.

A shared store may be slow, so its stores wait in the manager, where eviction can drop them, instead
of the runner's queue. A store leaves the manager when a thread can begin it. Its slot stays out of
use until the store ends. Bytes of writes in flight are limited too.
Invariant: at most as many stores wait in the queue as the storage has idle threads.
Cost: a step per running job, with a remote tier.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from kvtrie.errors import ConfigError
from kvtrie.tiers import Batched, Pool, in_memory, parts_of

if TYPE_CHECKING:
    import threading
    from collections.abc import Mapping, Sequence

    from kvtrie.settings.tier import Tier
    from kvtrie.tiers import TierBytes
    from kvtrie.transfer.schedule import Schedule

__all__ = ["RemoteStores", "write_limit"]

_SHARE = 8  # of host memory, for writes in flight to a remote tier


@runtime_checkable
class _CountsDrops(Protocol):
    def count_dropped(self, blocks: int) -> None:
        """Count blocks evicted before their store."""


class RemoteStores:
    """The remote tier of a runner, if any.

    Args:
        pools: the pool or storage of each tier.
        tiers: the manager's tiers.
        threads: the threads of each storage, and under None the threads for copies between pools.
        blocks_per_job: maximum number of blocks in a batched storage call.

    Attributes:
        tier: the remote tier, or None.
        limits: by remote tier, the maximum bytes of writes in flight: `write_limit`, or an eighth
            of host memory.

    Raises:
        ConfigError: a limit is below the size of a block.
    """

    def __init__(
        self,
        pools: Sequence[TierBytes | None],
        tiers: Sequence[Tier],
        threads: Mapping[int | None, Sequence[threading.Thread]],
        blocks_per_job: int,
    ) -> None:
        found = [at for at, tier in enumerate(tiers) if tier.kind == "remote"]
        self.tier = next((at for at in found if not in_memory(pools[at])), None)
        self._pool = None if self.tier is None else pools[self.tier]
        self._storage = self.tier if self.tier in threads else None
        self._threads = threads[self._storage]
        self._per_job = blocks_per_job if isinstance(self._pool, Batched) else 1
        memory = [pool for pool in pools if isinstance(pool, Pool) and pool.device.type == "cpu"]
        parts = parts_of(memory[-1]) if memory else ()
        # Groups of layers share the memory, so a store has at most the bytes of their largest
        # block.
        self._block = max(
            (part.layers * part.unit_bytes for part in parts if isinstance(part, Pool)), default=0
        )
        self.limits = {
            at: _limit(tiers[at], memory[-1].nbytes // self._block, self._block)
            for at in found
            if memory
        }
        self._dropped = 0

    def room(self, schedule: Schedule) -> int:
        """Return the number of stores, in blocks, startable now.

        Args:
            schedule: the waiting and running jobs.
        """
        if self.tier is None:
            return 0
        own = {job.worker for job in schedule.running}.intersection(self._threads)
        idle = len(self._threads) - len(own) - schedule.queue.ready(self._storage)
        blocks = max(0, idle) * self._per_job
        limit = self.limits.get(self.tier)
        if limit is not None:
            busy = schedule.writing(self.tier)
            blocks = min(blocks, max(int(not busy), (limit - busy) // self._block))
        return blocks

    def count_dropped(self, dropped: int) -> None:
        """Report stores dropped by eviction to the storage.

        Args:
            dropped: number of dropped stores since the manager's creation.
        """
        if dropped > self._dropped and isinstance(self._pool, _CountsDrops):
            self._pool.count_dropped(dropped - self._dropped)
        self._dropped = dropped


def write_limit(tier: Tier, blocks: int, block: int) -> int:
    """Return the maximum bytes of writes in flight to a tier, by default an eighth of host memory.

    Args:
        tier: the remote tier.
        blocks: blocks of host memory.
        block: bytes of a block.
    """
    return int(tier.write_limit or max(block, blocks * block // _SHARE))


def _limit(tier: Tier, blocks: int, block: int) -> int:
    limit = write_limit(tier, blocks, block)
    if limit < block:
        raise ConfigError(f"write_limit is {limit} bytes, at least one block of {block} wanted")
    return limit
