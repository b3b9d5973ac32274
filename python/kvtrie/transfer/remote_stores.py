"""RemoteStores: stores to tiers that several processes share, which nothing else waits for.

A shared store may take any time. So writes in flight to it are limited to a share of host memory,
and a store is refused whose slot another move awaits: the manager then drops the block.
Invariant: eviction never waits for a shared store. Cost: a step per waiting job, where there is
such a tier.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from kvtrie.errors import ConfigError
from kvtrie.tiers import Pool, in_memory
from kvtrie.transfer.job import Urgency

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtrie.settings.tier import Tier
    from kvtrie.tiers import TierBytes
    from kvtrie.transfer.queue import Queue

__all__ = ["RemoteStores"]

_SHARE = 8  # of host memory, for writes in flight to a remote tier


@runtime_checkable
class _CountsDrops(Protocol):
    def count_dropped(self, blocks: int) -> None:
        """Count blocks that were evicted before the store had them."""


class RemoteStores:
    """The remote tiers among those of a runner.

    Args:
        pools: the pool or storage of each tier.
        tiers: the manager's tiers.

    Attributes:
        limits: by remote tier, the most bytes of writes in flight: `write_limit`, or an eighth of
            host memory.

    Raises:
        ConfigError: a limit below one block.
    """

    def __init__(self, pools: Sequence[TierBytes | None], tiers: Sequence[Tier]) -> None:
        self._pools = tuple(pools)
        self._tiers = frozenset(
            at
            for at, tier in enumerate(tiers)
            if tier.kind == "remote" and not in_memory(pools[at])
        )
        self.limits = _limits(pools, tiers)

    def refuse_awaited(self, queue: Queue) -> list[list[int]]:
        """Return the stores whose slots others wait for, by tier, and count them as dropped.

        Args:
            queue: the jobs that wait.
        """
        awaited: dict[int, list[int]] = {}
        for job in queue if self._tiers else ():
            remote = job.store and job.tiers[1] in self._tiers
            if remote and (job.urgency < Urgency.BACKGROUND or queue.awaited(job.ids)):
                awaited.setdefault(job.tiers[1], []).extend(job.ids.tolist())
        for tier, ids in awaited.items():
            if isinstance(pool := self._pools[tier], _CountsDrops):
                pool.count_dropped(len(ids))
        return [*awaited.values()]


def _limits(pools: Sequence[TierBytes | None], tiers: Sequence[Tier]) -> dict[int, int]:
    limits: dict[int, int] = {}
    memory = [pool for pool in pools if isinstance(pool, Pool) and pool.device.type == "cpu"]
    for at, tier in enumerate(tiers):
        if tier.kind != "remote" or not memory:
            continue
        host = memory[-1]
        block = host.layers * host.unit_bytes
        limit = int(tier.write_limit or max(block, host.blocks * block // _SHARE))
        if limit < block:
            raise ConfigError(f"write_limit is {limit} bytes, at least one block of {block} wanted")
        limits[at] = limit
    return limits
