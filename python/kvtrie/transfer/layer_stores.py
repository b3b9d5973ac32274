"""LayerStores: copies the stores of a pass to host memory while later layers compute.

Layers are copied to spare blocks of the host pool, because a block is cached only when all its
layers are written. At the commit the manager plans its stores, and their slots adopt the spare
blocks.
Invariant: spare blocks for all layers are taken before the first layer, or none. An aborted pass
returns all of them.
Cost: per layer a call on the store stream and a few array operations.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from kvtrie.errors import ConfigError, TransferError
from kvtrie.tiers import KeptPool, Pool
from kvtrie.transfer.job import Job
from kvtrie.transfer.layer_copies import LayerCopies

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from numpy.typing import NDArray

    from kvtrie import Committed, Lease
    from kvtrie.transfer.connector import PagedConnector
    from kvtrie.transfer.executor import Executor
    from kvtrie.transfer.stream import Current, Stream

__all__ = ["LayerStores"]

_BELOW = 1


class LayerStores:
    """Stores of the tokens computed by a pass after the tokens of a lease.

    Args:
        executor: its manager commits the tokens.
        lease: a lease with room for the tokens.
        tokens: the tokens, as `Lease.commit` takes them.
        store: the stream for the copies.
        connector: makes the copies.
        wait_for_loads: blocks while a load awaited by a lease is in flight.

    Raises:
        ConfigError: the first tier is not written through, or no host pool is below it.
        NoSpaceError: the host pool has fewer spare blocks than the pass fills.
    """

    def __init__(
        self,
        executor: Executor,
        lease: Lease,
        tokens: Any,  # noqa: ANN401 - any token type of the manager
        store: Stream,
        connector: PagedConnector,
        *,
        wait_for_loads: Callable[[], None],
    ) -> None:
        manager, pool = executor.manager, connector.pool
        below = executor.pools[_BELOW] if len(executor.pools) > _BELOW else None
        if not isinstance(below, Pool) or manager.tiers[0].write != "through":
            raise ConfigError(
                "store_layer writes through to memory: the first tier wants write='through', not "
                f"{manager.tiers[0].write!r}, and a second tier of kind 'host'"
            )
        size, start = manager.block_tokens, lease.tokens
        first, last = start // size, (start + len(tokens)) // size
        room = lease.room
        if room is not None and len(tokens) > room:
            raise ConfigError(f"{len(tokens)} tokens to store, the lease has room for {room}")
        self._executor = executor
        self._claims = executor.claims
        self._ledger = executor.runner.ledger
        self._lease = lease
        self._tokens = tokens
        self._store = store
        self._wait_for_loads = wait_for_loads
        self._below = below
        self._blocks = range(first, last)
        self._error: BaseException | None = None
        each, slots = np.arange(pool.layers), lease.slots(0)[..., first:last].astype(np.int64)
        # A table of layer slots has a row per layer.
        units = slots.T if pool.layer_slots else pool.layer_units(slots, 0)[:, None] + each
        self._spares = below.set_aside(len(self._blocks))
        spares = below.spare_units(self._spares)[:, None] + each
        self._copies = LayerCopies(pool, units, below, spares, copy=connector.copy)
        self._way = Job(pool, below, (0, _BELOW), store=True)

    def save(self, layer: int, current: Current | None) -> None:
        """Start copying a layer to host memory.

        Args:
            layer: the layer.
            current: the stream of the computation, or None if an earlier request of the batch has
                already made the store stream wait for it.
        """
        if current is not None:
            self._store.wait(current.record())
        if self._spares:
            self._store.submit(partial(self._copy, layer))

    def commit(self) -> Committed:
        """Block until all layers are copied, and commit the tokens.

        The stores then planned by the manager copy nothing: their slots adopt the spare blocks. The
        runner executes the remaining stores.

        Raises:
            TransferError: a copy failed, and nothing was committed.
        """
        self._store.synchronize()
        if self._error is not None:
            raise TransferError(
                f"lease {self._lease.id}: what it computed could not be stored: {self._error}"
            ) from self._error
        ledger, layers = self._ledger, self._copies.layers
        with ledger.section:
            ledger.poll(self._claims.sweep)
            slots = self._lease.slots(0)[..., self._blocks.start : self._blocks.stop].reshape(-1)
            committed = self._lease.commit(self._tokens, now=self._executor.clock())
            moves = self._executor.manager.moves()
            down: NDArray[np.bool_] = (moves.src == 0) & (moves.dst == _BELOW) & (moves.after == 0)
            down &= (moves.layer_lo == 0) & (moves.layer_hi == layers)
            down &= np.isin(moves.src_slot, slots)
            spares = dict(zip(slots.tolist(), self._spares, strict=False))
            taken = [spares.pop(slot) for slot in moves.src_slot[down].tolist()]
            self._spares = [*spares.values()]
            self._below.adopt(moves.dst_slot[down], np.asarray(taken, dtype=np.int64))
            if isinstance(self._below, KeptPool):
                down_moves = moves[down]
                keys = [key.tobytes() for key in down_moves.key]
                self._below.named(down_moves.dst_slot, keys, down_moves.label)
            if not down.all():
                ledger.accept(moves[~down])
            ids = moves.id[down]
            ledger.report(ids)
            ledger.take()
        self.close()
        ledger.report_progress(ids, layers, layers, None)
        return committed

    def _copy(self, layer: int) -> None:
        if self._error is not None:
            return
        try:
            # Copies in both directions slow each other down: awaited loads come first.
            self._wait_for_loads()
            self._claims.copying(self._way)
            begin, came = self._store.mark(), 0
            try:
                self._copies.copy(layer, layer + 1)
                came = len(self._blocks) * self._below.unit_bytes
                if begin is not None:
                    report = partial(self._claims.record_copy_time, self._way, came)
                    self._store.measure(begin, report)
            finally:
                self._claims.copied(self._way, came, layer + 1, handed=begin is not None)
        except BaseException as caught:  # noqa: BLE001 - raised by `commit`
            self._error = caught

    def close(self) -> None:
        """Return the unused spare blocks. Closing twice does nothing."""
        if self._spares:
            self._store.synchronize()
            self._below.put_back(self._spares)
            self._spares = []
