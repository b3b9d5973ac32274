"""LayerwiseEngine: overlaps loads and stores with a forward pass, layer by layer.

Leases and plans decide. The engine executes the executor's moves in the order of layers while the
pass computes. It uses three streams: the caller's stream, a load stream and a store stream.
Invariant: `retrieve_layer` yields layers + 2 times and `store_layer` layers + 1 times, with or
without a hit. An aborted generator releases all its resources.
Cost: per pass a claim of the lease's moves and a report of their end. Per layer a call on a
stream.
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
    """Settings of a `LayerwiseEngine`.

    Attributes:
        use_layerwise: start a pass when layer 0 is present, otherwise when all layers are present.
        blending: gather each layer's match in a buffer, for fusion.
        use_gpu: copy through staging buffers on the first tier's device, instead of directly.
        look_ahead: layers in flight during the computation of a layer, with `blending` limited by
            staging. By default 2, and all layers for a `KvtrieCache`.
        staging_bytes: maximum size of the staging buffers per direction, also as "64MiB".
        readers: threads per request that read from storages.

    Raises:
        ConfigError: a number is out of range.
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
    """A request of a batch.

    Attributes:
        lease: its lease.
        tokens: the tokens computed by the pass after the tokens of the lease.
    """

    lease: Lease
    tokens: Any


class LayerwiseEngine:
    """Loads and stores KV while the passes of one model compute.

    Only the thread of the passes may call it. An open engine with `settings` also loads for all
    caches and fetches opened on its executor, with its settings.

    Args:
        executor: the executor of the manager and pools.
        settings: the settings; `Layerwise()` by default.

    Attributes:
        connector: makes the copies: `PagedConnector`, or `BufferedConnector` with `blending`.
        current: the caller's stream.
        load: the stream of loads.
        store: the stream of stores.
        layerwise_retrievers: a generator per request of the running batch.

    Raises:
        ConfigError: the first tier has no memory, or it keeps separate groups of layers and the
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
        """Return the engine for loads of single leases by caches and fetches, through `open`.

        It is the last open engine with settings on the executor. Otherwise it is an engine with
        default settings, closed with its executor.

        Args:
            executor: the executor.

        Raises:
            ConfigError: the first tier has no memory, or the settings have `blending`: caches and
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
                # A proxy keeps no executor alive, so it may be dropped without `close`.
                _shared[executor] = cls(weakref.proxy(executor))
            return _shared[executor]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def acquire(self, tokens: Any, **options: Any) -> Lease:  # noqa: ANN401 - as the manager's
        """Call `BlockManager.acquire`, and hold its loads until `retrieve_layer`.

        The loads of a lease made elsewhere start at once, without the order of layers.
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
            sync: whether the caller's stream waits for each layer before its yield. Otherwise wait
                by a separate call, as `wait_for_layer_load` for a batch.

        Yields:
            The hit count in tokens, then the index of each layer once it is present, and the hit
            count again once all loads have ended: `layers + 2` values, even without a hit.

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
        """Open the loads of a lease for a caller that issues each layer and calls `end`.

        Several loads may be open together. A failure of a lease does not affect the rest.

        Args:
            lease: the lease.
        """
        loads = self._open_loads(lease)
        self._single_loads.add(loads)
        return loads

    def end(self, loads: LayerLoads) -> None:
        """End loads opened by `open`. Missing layers can be loaded again."""
        try:
            loads.close()
        finally:
            self._single_loads.discard(loads)
            self._release_staging()

    def store_layer(self, lease: Lease, tokens: Any) -> Generator[int | Committed]:  # noqa: ANN401
        """Store the KV computed by a pass, layer by layer, and commit its tokens.

        Advance the generator after each layer is computed, or enqueued on the GPU.

        Args:
            lease: a lease with room for the tokens.
            tokens: the tokens computed by the pass after the tokens of the lease.

        Yields:
            The index of each layer once its copy has started, then the result of `Lease.commit`
            once all layers are copied: `layers + 1` values.

        Raises:
            NoSpaceError: the host has no room for all layers of all blocks. Raised before the first
                layer.
            ConfigError: the first tier is not written through to memory.
            TransferError: a copy failed, and nothing was committed.
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
        """Begin a pass over several requests and start the loads of their first layers.

        Returns:
            The hit count of each request, in tokens.

        Raises:
            ConfigError: the previous pass was not ended by `wait_for_save` or `abort`.
        """
        if self._batch:
            raise ConfigError(f"a pass over {len(self._batch)} requests has not ended")
        self._batch = list(batch)
        try:
            self._loads = [self._open_loads(request.lease) for request in batch]
            ahead = self._ahead(sum(one.tokens for one in self._loads))
            # A step loads a layer of each request. Only the last request waits for it.
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
        """Start the loads of the next layer and wait for a layer, before its computation.

        The caller's stream waits once for all requests, with the last request.

        Raises:
            TransferError: a request's layer cannot be loaded. Call `abort`.
        """
        if layer + 1 < self.layers:
            for one in self.layerwise_retrievers:
                next(one)
        # The load stream reaches the last request's event after the events of earlier requests.
        for at, loads in enumerate(reversed(self._loads)):
            loads.wait(self.wanted(layer), self.current, last=at == 0)
        self.load.wake()
        if layer + 1 == self.layers:
            for one in self.layerwise_retrievers:
                next(one)

    def save_kv_layer(self, layer: int) -> None:
        """Start the stores of a computed layer.

        The store stream waits for the caller's stream once, with the first request.

        Raises:
            NoSpaceError: at the first layer: the host has no room for all layers.
        """
        if layer == 0:
            self._stores = []
            for request in self._batch:
                self._stores.append(self._open_stores(request.lease, request.tokens))
        for at, stores in enumerate(self._stores):
            stores.save(layer, self.current if at == 0 else None)

    def wait_for_save(self) -> list[Committed]:
        """End a pass: store and commit the computed tokens.

        Returns:
            The result of `Lease.commit` for each request of the batch.

        Raises:
            TransferError: a copy failed. Call `abort`.
        """
        committed = [stores.commit() for stores in self._stores]
        self._end()
        return committed

    def buffer(self, lease: Lease, layer: int) -> LayerBuffer:
        """Return the match of a lease at the last awaited layer, with `blending`.

        Args:
            lease: a lease with open loads.
            layer: the layer.

        Returns:
            K `(tokens, kv_heads, head_dim)` and V in the order of the tokens.

        Raises:
            ConfigError: the lease has no open loads, or the engine has no buffers.
        """
        for loads in (*self._loads, *self._single_loads):
            if loads.lease.id == lease.id:
                return loads.buffer(layer)
        raise ConfigError(f"nothing is retrieved for lease {lease.id}")

    def abort(self) -> None:
        """Release all resources of the running pass, except its leases."""
        self._end()

    @property
    def look_ahead(self) -> int:
        """Layers in flight during the computation of a layer, for passes driven by this engine."""
        return _AHEAD if self.settings.look_ahead is None else self.settings.look_ahead

    @property
    def staged_bytes(self) -> int:
        """Bytes of the staging buffers and layer buffers."""
        return self.connector.staged_bytes

    def close(self) -> None:
        """Abort the running pass and end the streams. Closing twice does nothing."""
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
        # Requests share the buffers of a direction, so the last request releases them.
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
        """Load a layer for leases awaited by this thread."""
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
        """Return the layer to wait for before a layer computes."""
        return layer if self.settings.use_layerwise else self.layers - 1

    def _ahead(self, tokens: int) -> int:
        """Return the maximum number of layers in flight during the computation of a layer."""
        if isinstance(self.connector, BufferedConnector):
            return min(self.look_ahead, self.connector.layers_at_once(tokens) - 1)
        return self.look_ahead

    def _join_loads(self) -> None:
        """Block while a load awaited by a lease is in flight."""
        for loads in (*self._loads, *self._single_loads):
            loads.join()
        claims = self.executor.claims
        if not claims.quiet():
            claims.until(claims.quiet, "loads do not end")
