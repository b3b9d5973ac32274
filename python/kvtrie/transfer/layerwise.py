"""LayerwiseEngine: loads and stores that stagger through a forward pass, layer by layer.

Leases and plans decide; the engine carries out the executor's moves in the order of layers while
the pass computes. It uses three streams: the caller's, one for loads and one for stores.
Invariant: `retrieve_layer` yields layers + 2 times and `store_layer` layers + 1 times, with or
without a hit; an aborted one releases all that it has taken. Cost: per pass one claim of the
lease's moves and one report of their end; per layer a call on a stream.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from kvtrie.errors import ConfigError
from kvtrie.settings.argument import put
from kvtrie.settings.sizes import size
from kvtrie.tiers import Pool, parts_of, sole_pool
from kvtrie.transfer.connector import BufferedConnector, PagedConnector
from kvtrie.transfer.layer_loads import LayerLoads
from kvtrie.transfer.layer_order import LayerOrder
from kvtrie.transfer.layer_stores import LayerStores
from kvtrie.transfer.stream import Current, Stream

if TYPE_CHECKING:
    from collections.abc import Collection, Generator, Sequence
    from typing import Any, Self

    from kvtrie import Committed, Lease
    from kvtrie.transfer.connector import LayerBuffer
    from kvtrie.transfer.executor import Executor

__all__ = ["Layerwise", "LayerwiseEngine", "Request"]

_shared: weakref.WeakKeyDictionary[Executor, LayerwiseEngine] = weakref.WeakKeyDictionary()
_opened: weakref.WeakKeyDictionary[Executor, weakref.ref[LayerwiseEngine]] = (
    weakref.WeakKeyDictionary()
)
_sharing = threading.Lock()
_AHEAD = 2


@dataclass(frozen=True, slots=True)
class Layerwise:
    """How a `LayerwiseEngine` works.

    Attributes:
        use_layerwise: start a pass when layer 0 is there; otherwise when all layers are.
        blending: gather each layer's match in one buffer, for fusion.
        use_gpu: copy through staging buffers on the first tier's device, instead of directly.
        look_ahead: layers in flight while one computes; with `blending` at most as many as
            staging holds. By default 2, and all of them for a `KvtrieCache`.
        staging_bytes: the most that staging buffers of one direction take, also as "64MiB".
        readers: threads that read from storages, per request.

    Raises:
        ConfigError: a number out of range.
    """

    use_layerwise: bool = True
    blending: bool = False
    use_gpu: bool = False
    look_ahead: int | None = None
    staging_bytes: int | str = 256 << 20
    readers: int = 4

    def __post_init__(self) -> None:
        put(self, staging_bytes=size("staging_bytes", self.staging_bytes))
        if (self.look_ahead or 0) < 0 or self.readers < 1:
            raise ConfigError(
                f"look_ahead is {self.look_ahead}, readers {self.readers}: at least 0 and 1 wanted"
            )


class Request(NamedTuple):
    """One request of a batch.

    Attributes:
        lease: the blocks that it holds.
        tokens: the tokens that the pass computes after those that the lease holds.
    """

    lease: Lease
    tokens: Any


class LayerwiseEngine:
    """Loads and stores KV while the passes of one model compute.

    Only the thread that runs the passes may call it. While an engine with `settings` is open,
    caches and fetches that are opened on its executor load through it, with its settings.

    Args:
        executor: its manager and pools are used.
        settings: the settings; `Layerwise()` by default.

    Attributes:
        connector: makes the copies: `PagedConnector`, or `BufferedConnector` with `blending`.
        current: the caller's stream.
        load: the stream of loads.
        store: the stream of stores.
        layerwise_retrievers: a generator per request of the batch that runs.

    Raises:
        ConfigError: the first tier has no memory, or it keeps groups of layers apart and the
            settings ask for buffers.
    """

    def __init__(self, executor: Executor, settings: Layerwise | None = None) -> None:
        self.settings = settings or Layerwise()
        pool, *others = parts_of(executor.pools[0])
        if not isinstance(pool, Pool) or self.settings.blending or self.settings.use_gpu:
            pool = sole_pool(executor.pools[0], "to load into")
        self.executor = executor
        groups = [group.layers for group in executor.manager.model.groups] if others else ()
        self._order = LayerOrder(groups or [range(pool.layers)])
        self.layers = self._order.layers
        path = BufferedConnector if self.settings.blending else PagedConnector
        self.connector = path(
            pool, use_gpu=self.settings.use_gpu, staging_bytes=int(self.settings.staging_bytes)
        )
        self.current = Current(pool.device)
        self.load = Stream("kvtrie-load", pool.device)
        self.store = Stream("kvtrie-store", pool.device)
        self.layerwise_retrievers: list[Generator[int]] = []
        self._batch: list[Request] = []
        self._loads: list[LayerLoads] = []
        self._single_loads: set[LayerLoads] = set()
        self._single_stores: set[LayerStores] = set()
        self._stores: list[LayerStores] = []
        executor.attach(self)
        if settings is not None:
            with _sharing:
                _opened[executor] = weakref.ref(self)

    @classmethod
    def of(cls, executor: Executor) -> LayerwiseEngine:
        """Return the engine through which caches and fetches load single leases by `open`.

        That is the last one that was opened with settings on the executor, until it is closed;
        otherwise one with default settings, which ends with its executor.

        Args:
            executor: whose.

        Raises:
            ConfigError: the first tier has no memory, or the settings say `blending`: caches and
                fetches load into their own slots.
        """
        with _sharing:
            opened = _opened.get(executor)
            engine = None if opened is None else opened()
            if engine is not None:
                if engine.settings.blending:
                    raise ConfigError(
                        "the engine that is open on this executor has blending=True; caches and "
                        "fusion load into their own slots: close it, or open it with blending=False"
                    )
                return engine
            if executor not in _shared:
                # It keeps no executor alive: one may simply be dropped.
                _shared[executor] = cls(weakref.proxy(executor))
            return _shared[executor]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def acquire(self, tokens: Any, **options: Any) -> Lease:  # noqa: ANN401 - as the manager's
        """`BlockManager.acquire`, whose loads wait for `retrieve_layer`.

        A lease made elsewhere only loses the order of layers: its loads start at once.
        """
        options.setdefault("now", self.executor.clock())
        options.setdefault("layerwise", self.settings.use_layerwise)
        return self.executor.claims.acquire(
            partial(self.executor.manager.acquire, tokens, **options)
        )

    def retrieve_layer(self, lease: Lease, *, sync: bool = True) -> Generator[int]:
        """Load the blocks of a lease, layer by layer.

        Args:
            lease: the lease.
            sync: whether the caller's stream waits for each layer before it is yielded; otherwise
                another call does, as `wait_for_layer_load` for a batch.

        Yields:
            The hit count in tokens; each layer's index, when it is there; the hit count again, when
            nothing is on its way any more. That is `layers + 2` times, also without a hit.

        Raises:
            TransferError: a layer cannot be loaded. Its remaining moves are cancelled: release the
                lease and acquire again.
        """
        loads = self.open(lease)
        ahead = self._ahead(loads.tokens) if sync else 0
        try:
            yield from self._retrieve(loads, ahead, sync=sync)
        finally:
            self.end(loads)

    def open(self, lease: Lease) -> LayerLoads:
        """Open the loads of a lease for a caller that issues each layer itself and calls `end`.

        Several may be open at once; a failure of one does not affect the others.

        Args:
            lease: the lease.
        """
        loads = self._open_loads(lease)
        self._single_loads.add(loads)
        return loads

    def end(self, loads: LayerLoads) -> None:
        """End loads that `open` gave: layers that have not come can be asked for again."""
        try:
            loads.close()
        finally:
            self._single_loads.discard(loads)
            self._release_staging()

    def store_layer(self, lease: Lease, tokens: Any) -> Generator[int | Committed]:  # noqa: ANN401
        """Store the KV that a pass computes, layer by layer, and commit its tokens.

        Each step is to be made when its layer has been computed, or handed to the GPU.

        Args:
            lease: with room for the tokens.
            tokens: the tokens that the pass computes after those that the lease holds.

        Yields:
            Each layer's index, when its copy has been started; what `Lease.commit` gave, when all
            is down. That is `layers + 1` times.

        Raises:
            NoSpaceError: the host has no room for all layers of all blocks; before the first layer.
            ConfigError: the first tier is not written through to memory.
            TransferError: a copy failed; nothing is committed.
        """
        stores = self._open_stores(lease, tokens)
        self._single_stores.add(stores)
        try:
            for layer in range(self.layers):
                stores.save(layer, self.current)
                yield layer
            yield stores.commit()
        finally:
            stores.close()
            self._single_stores.discard(stores)
            self._release_staging()

    def start_load_kv(self, batch: Sequence[Request]) -> list[int]:
        """Begin a pass over several requests: their first layers are on their way.

        Returns:
            The hit count of each, in tokens.

        Raises:
            ConfigError: the pass before it has not been ended by `wait_for_save` or `abort`.
        """
        if self._batch:
            raise ConfigError(f"a pass over {len(self._batch)} requests has not ended")
        self._batch = list(batch)
        try:
            self._loads = [self._open_loads(request.lease) for request in batch]
            ahead = self._ahead(sum(one.tokens for one in self._loads))
            # A step brings one layer of each request; the wait for it comes with the last of them.
            self.layerwise_retrievers = [
                self._retrieve(one, max(0, ahead - 1), sync=False) for one in self._loads
            ]
            hits = [next(one) for one in self.layerwise_retrievers]
            for one in self.layerwise_retrievers:
                next(one)
            self.load.wake()
        except BaseException:
            self.abort()
            raise
        return hits

    def wait_for_layer_load(self, layer: int) -> None:
        """Before a layer computes: start the next one's loads, and wait for its own.

        The caller's stream waits once, with the last request, for all of them.

        Raises:
            TransferError: a request's layer does not come; call `abort`.
        """
        if layer + 1 < self.layers:
            for one in self.layerwise_retrievers:
                next(one)
        # The load stream reaches the last request's event after those of all other requests.
        for at, loads in enumerate(reversed(self._loads)):
            loads.wait(self.wanted(layer), self.current, last=at == 0)
        self.load.wake()
        if layer + 1 == self.layers:
            for one in self.layerwise_retrievers:
                next(one)

    def save_kv_layer(self, layer: int) -> None:
        """After a layer has been computed: start its stores.

        The store stream waits for the caller's once, with the first request.

        Raises:
            NoSpaceError: at the first layer: the host has no room for all of them.
        """
        if layer == 0:
            self._stores = []
            for request in self._batch:
                self._stores.append(self._open_stores(request.lease, request.tokens))
        for at, stores in enumerate(self._stores):
            stores.save(layer, self.current if at == 0 else None)

    def wait_for_save(self) -> list[Committed]:
        """End a pass: store and commit the tokens that it computed.

        Returns:
            For each request of the batch what `Lease.commit` gave.

        Raises:
            TransferError: a copy failed; call `abort`.
        """
        committed = [stores.commit() for stores in self._stores]
        self._end()
        return committed

    def buffer(self, lease: Lease, layer: int) -> LayerBuffer:
        """Return, with `blending`, the match of a lease at the layer that was waited for last.

        Args:
            lease: a lease whose loads are open.
            layer: the layer.

        Returns:
            K `(tokens, kv_heads, head_dim)` and V in the order of the tokens.

        Raises:
            ConfigError: nothing is retrieved for that lease, or not into buffers.
        """
        for loads in (*self._loads, *self._single_loads):
            if loads.lease.id == lease.id:
                return loads.buffer(layer)
        raise ConfigError(f"nothing is retrieved for lease {lease.id}")

    def abort(self) -> None:
        """Release all that the running pass has taken, except its leases."""
        self._end()

    @property
    def look_ahead(self) -> int:
        """Layers in flight while one computes, of a pass that this engine drives."""
        return _AHEAD if self.settings.look_ahead is None else self.settings.look_ahead

    @property
    def staged_bytes(self) -> int:
        """Bytes of its staging buffers and layer buffers."""
        return self.connector.staged_bytes

    def close(self) -> None:
        """Abort what runs and end the streams. Closing twice does nothing."""
        self._end()
        with _sharing:
            for executor in [at for at, opened in _opened.items() if opened() is self]:
                del _opened[executor]
        for loads in list(self._single_loads):
            loads.close()
        self.connector.release()
        self.load.close()
        self.store.close()

    def _end(self) -> None:
        for loads in self._loads:
            loads.close()
        for stores in self._stores:
            stores.close()
        self.layerwise_retrievers, self._loads, self._stores = [], [], []
        self._batch = []
        self._release_staging()

    def _release_staging(self) -> None:
        # Requests share the buffers of a direction: the last one gives them back.
        if not (self._loads or self._stores or self._single_loads or self._single_stores):
            self.connector.release()

    def _open_loads(self, lease: Lease) -> LayerLoads:
        return LayerLoads(
            self.executor,
            lease,
            self.load,
            self.connector,
            order=self._order,
            readers=self.settings.readers,
            rush=self._rush,
            help_on=self._help,
        )

    def _rush(self) -> None:
        for loads in (*self._loads, *self._single_loads):
            loads.hasten()

    def _help(self, leases: Collection[int], layer: int) -> None:
        """Bring a layer of some leases' loads, for which another lease of this thread waits."""
        for loads in (*self._loads, *self._single_loads):
            if loads.lease.id in leases:
                loads.issue(layer + 1)
        for lease in leases:
            self.executor.claims.disclaim(lease)

    def _open_stores(self, lease: Lease, tokens: Any) -> LayerStores:  # noqa: ANN401 - as above
        sole_pool(self.executor.pools[0], "to store from layer by layer")
        return LayerStores(
            self.executor,
            lease,
            tokens,
            self.store,
            self.connector,
            wait_for_loads=self._join_loads,
        )

    def _retrieve(self, loads: LayerLoads, ahead: int, *, sync: bool) -> Generator[int]:
        yield loads.tokens
        for layer in range(self.layers):
            loads.issue(max(layer + 1 + ahead, self.wanted(layer) + 1))
            if sync:
                loads.wait(self.wanted(layer), self.current)
                self.load.wake()
            yield layer
        loads.finish()
        yield loads.tokens

    def wanted(self, layer: int) -> int:
        """Return the index of the layer that has to be there for this one to compute."""
        return layer if self.settings.use_layerwise else self.layers - 1

    def _ahead(self, tokens: int) -> int:
        """Return the number of layers that may be in flight while one computes."""
        if isinstance(self.connector, BufferedConnector):
            return min(self.look_ahead, self.connector.layers_at_once(tokens) - 1)
        return self.look_ahead

    def _join_loads(self) -> None:
        """Block while a load that a lease awaits is in flight."""
        for loads in (*self._loads, *self._single_loads):
            loads.join()
        claims = self.executor.claims
        if not claims.quiet():
            claims.until(claims.quiet, "loads do not end")
