"""Arrival: loads of a cache's rows, layer by layer during the first pass.

Only blocks from memory load by layer. A block on a storage is verified whole, and a damaged one
makes the match shorter, which must be known before a pass begins. Holes that are computed inside a
match also need all layers of the tokens before them.
Invariant: a layer that `wait` was called for is there for every row. Cost: as `LayerLoads`.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from kvtrie.errors import ConfigError
from kvtrie.tiers import Pool
from kvtrie.transfer import Layerwise, LayerwiseEngine

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
    """

    def __init__(self, executor: Executor, leases: Sequence[Lease]) -> None:
        self._engine = LayerwiseEngine.of(executor)
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
            ConfigError: settings of the engine that is open on it which have no effect here.
        """
        settings = LayerwiseEngine.of(executor).settings
        if settings.readers != Layerwise().readers:
            raise ConfigError(
                f"readers is {settings.readers}: a KvtrieCache reads storages with the workers of "
                "its Executor; give workers there and leave readers as it is"
            )
        return settings.use_layerwise

    @classmethod
    def of(cls, executor: Executor, leases: Sequence[Lease]) -> Self | None:
        """The loads of leases that can go by layer; None where none loads, or they cannot.

        Those that cannot are left to the executor.
        """
        late = [lease for lease in leases if not lease.ready()]
        if late and all(_by_layer(executor, lease) for lease in leases):
            return cls(executor, late)
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


def _by_layer(executor: Executor, lease: Lease) -> bool:
    """Whether nothing amid the match of a lease is computed, nor read from a storage."""
    return all(
        span.action != "recompute" and isinstance(executor.pools[span.tier], Pool)
        for span in lease.plan.spans
    )
