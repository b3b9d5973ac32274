"""Arrival: loads the blocks of a cache's rows layer by layer during the first pass.

Blocks in memory can load by layer. A disk verifies each layer, so its blocks can load by layer if
the caller can recompute a damaged block and the lease waits only for its own loads. The executor
keeps loads waiting for slots or for a load of a different lease. It also keeps loads from storages
that verify whole blocks, and matches with holes, because computing a hole needs all layers of the
tokens before it.
Invariant: after `wait(layer)`, the layer is loaded for every row. Cost: as `LayerLoads`.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from kvtrie.tiers import DiskStorage, Pool
from kvtrie.transfer import LayerwiseEngine

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    from kvtrie import Lease
    from kvtrie.transfer import Executor
    from kvtrie.transfer.layer_loads import LayerLoads

__all__ = ["Arrival"]


class Arrival:
    """Layerwise loads in flight, of leases made by `Executor.claims`.

    Args:
        executor: the executor of the leases.
        leases: leases with unfinished loads.
        disk: whether blocks come from a disk.
    """

    def __init__(self, executor: Executor, leases: Sequence[Lease], *, disk: bool = False) -> None:
        self._engine = LayerwiseEngine.of(executor)
        self._disk = disk
        self._loads: list[LayerLoads] = []
        try:
            for lease in leases:
                self._loads.append(self._engine.open(lease))
            self._issue(0)
        except BaseException:
            self.abandon()
            raise
        self._engine.load.wake()

    @staticmethod
    def wanted(executor: Executor) -> bool:
        """Return whether an executor's settings let a pass wait layer by layer.

        Raises:
            ConfigError: the executor's open engine has `blending`.
        """
        return LayerwiseEngine.of(executor).settings.use_layerwise

    @classmethod
    def of(cls, executor: Executor, leases: Sequence[Lease], *, disk: bool) -> Self | None:
        """Start the loads of leases layer by layer, if possible.

        Returns None if no lease is loading, or if its loads cannot go by layer. The executor then
        runs the loads.

        Args:
            executor: the executor of the leases.
            leases: leases made by `Executor.claims`.
            disk: whether blocks on a disk may load by layer.
        """
        late = [lease for lease in leases if not lease.ready()]
        able = all(_by_layer(executor, lease, Pool) for lease in leases)
        # With a look-ahead, loads wait for the pass and would delay leases sharing the blocks.
        disk = not able and disk and LayerwiseEngine.of(executor).settings.look_ahead is None
        if disk:
            able = all(_by_layer(executor, lease, (Pool, DiskStorage)) for lease in leases)
            able = able and all(executor.claims.alone(lease) for lease in late)
        if late and able:
            return cls(executor, late, disk=disk)
        for lease in leases:
            executor.claims.disclaim(lease.id)
        return None

    def wait(self, layer: int) -> None:
        """Make the caller's stream wait for a layer of all rows, before the layer computes.

        Raises:
            TransferError: a load of the layer has failed.
        """
        self._issue(layer)
        for loads in self._loads:
            loads.wait(layer, self._engine.current)
        self._engine.load.wake()

    def read(self) -> None:
        """Block until the GPU has read a layer, if blocks come from a disk.

        A failed load frees its slots, and a different lease may then overwrite them.
        """
        if self._disk:
            self._engine.current.synchronize()

    def finish(self) -> None:
        """Block until all loads have ended.

        Raises:
            TransferError: a load has failed.
        """
        try:
            self.wait(self._engine.layers - 1)
            for loads in self._loads:
                loads.finish()
        finally:
            self.abandon()

    def _issue(self, layer: int) -> None:
        """Start loads in layer order up to the look-ahead of a layer, or all by default."""
        ahead = self._engine.settings.look_ahead
        stop = self._engine.layers if ahead is None else layer + 1 + ahead
        for upper in range(stop):
            for loads in self._loads:
                loads.issue(upper + 1)

    def abandon(self) -> None:
        """Return unfinished loads to the executor. Idempotent."""
        while self._loads:
            self._engine.end(self._loads.pop())

    def abandon_elsewhere(self) -> None:
        """Abandon on a new thread: `abandon` may wait for the thread running the collector."""
        threading.Thread(target=self.abandon, name="kvtrie-abandon", daemon=True).start()


def _by_layer(executor: Executor, lease: Lease, kinds: type | tuple[type, ...]) -> bool:
    """Return whether a match has no holes, and all its tiers are of the given kinds."""
    spans = lease.plan.spans  # of the first group. Later groups may load from different tiers
    tiers = executor.claims.tiers(lease).union(span.tier for span in spans)
    return all(span.action != "recompute" for span in spans) and all(
        isinstance(executor.pools[tier], kinds) for tier in tiers
    )
