"""RemoteStores: how many stores to a tier that several processes share may begin now.

A shared store may take any time, so its stores wait in the manager, where eviction drops them, and
not in the runner's queue. A store is taken from the manager when a thread can begin it; its
slot stays out of use from then until it has ended. Bytes of writes in flight are limited too.
Invariant: as many stores wait in the queue as the storage has idle threads, or fewer. Cost: a step
per running job, where there is such a tier.
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
        """Count blocks that were evicted before the store had them."""


class RemoteStores:
    """The remote tier of a runner, if it has one.

    Args:
        pools: the pool or storage of each tier.
        tiers: the manager's tiers.
        threads: the threads of each storage; those that copy between pools under None.
        blocks_per_job: the most blocks that go in one call of a storage that takes several.

    Attributes:
        tier: the tier; None without one.
        limits: by remote tier, the most bytes of writes in flight: `write_limit`, or an eighth of
            host memory.

    Raises:
        ConfigError: a limit below one block.
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
        # Groups of layers share the memory: a store is of at most the largest block among theirs.
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
        """Return the number of blocks whose stores threads can begin now.

        Args:
            schedule: the jobs that wait and run.
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
        """Let the storage count the stores that eviction has dropped.

        Args:
            dropped: their number since the manager was made.
        """
        if dropped > self._dropped and isinstance(self._pool, _CountsDrops):
            self._pool.count_dropped(dropped - self._dropped)
        self._dropped = dropped


def write_limit(tier: Tier, blocks: int, block: int) -> int:
    """The most bytes of writes in flight to a tier: its `write_limit`, or an eighth of host memory.

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
