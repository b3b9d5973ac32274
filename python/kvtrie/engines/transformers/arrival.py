"""Arrival: loads of a cache's rows, layer by layer during the first pass.

Blocks load by layer from memory. From a disk, which proves each layer, they do where the caller can
compute a block that turns out damaged and where the lease awaits nothing but these loads: loads
that wait for slots, or for those of other leases, are left to the executor. Other storages prove
whole blocks. Holes that are computed inside a match need all layers of the tokens before them.
Invariant: a layer that `wait` was called for is there for every row. Cost: as `LayerLoads`.
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
    """The loads of some leases, which were made by `Executor.claims`, on their way.

    Args:
        executor: whose leases.
        leases: those that are not ready.
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
            ConfigError: the engine that is open on it has `blending`.
        """
        return LayerwiseEngine.of(executor).settings.use_layerwise

    @classmethod
    def of(cls, executor: Executor, leases: Sequence[Lease], *, disk: bool) -> Self | None:
        """The loads of leases that can go by layer; None where none loads, or they cannot.

        Those that cannot are left to the executor.

        Args:
            executor: whose leases.
            leases: made by `Executor.claims`.
            disk: whether blocks on a disk can.
        """
        late = [lease for lease in leases if not lease.ready()]
        able = all(_by_layer(executor, lease, Pool) for lease in leases)
        # Loads that wait for a pass would keep others from what they bring.
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
        """Before a layer computes: let the caller's stream wait for it, in every row.

        Raises:
            TransferError: a row's layer does not come.
        """
        self._issue(layer)
        for loads in self._loads:
            loads.wait(layer, self._engine.current)
        self._engine.load.wake()

    def read(self) -> None:
        """After a layer is read: from a disk, block until that has ended on the GPU.

        A load that fails gives its slots back, from then on for others to write.
        """
        if self._disk:
            self._engine.current.synchronize()

    def finish(self) -> None:
        """Block until all is there and nothing on its way.

        Raises:
            TransferError: a row's loads do not come.
        """
        try:
            self.wait(self._engine.layers - 1)
            for loads in self._loads:
                loads.finish()
        finally:
            self.abandon()

    def _issue(self, layer: int) -> None:
        """Start the loads of a layer and of those ahead of it: by default all, in this order."""
        ahead = self._engine.settings.look_ahead
        stop = self._engine.layers if ahead is None else layer + 1 + ahead
        for upper in range(stop):
            for loads in self._loads:
                loads.issue(upper + 1)

    def abandon(self) -> None:
        """Give back what has not come. Twice does nothing."""
        while self._loads:
            self._engine.end(self._loads.pop())

    def abandon_elsewhere(self) -> None:
        """Abandon on another thread: garbage may be collected on the thread that is waited for."""
        threading.Thread(target=self.abandon, name="kvtrie-abandon", daemon=True).start()


def _by_layer(executor: Executor, lease: Lease, kinds: type | tuple[type, ...]) -> bool:
    """Whether nothing amid the match of a lease is computed, and all tiers are of these kinds."""
    spans = lease.plan.spans  # of the first group; loads of others may be from other tiers
    tiers = executor.claims.tiers(lease).union(span.tier for span in spans)
    return all(span.action != "recompute" for span in spans) and all(
        isinstance(executor.pools[tier], kinds) for tier in tiers
    )
