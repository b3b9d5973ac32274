"""Fusor: fuses pre-computed chunks and a query into a cache, recomputing the most relevant tokens.

The store leases all chunks at once. Each missing chunk is computed after the prefix, without the
rest of the chunks, and kept. Then each layer is fused while the next layer is loaded. The fused
cache is an approximation: its lease commits nothing, so no request can match its blocks.
Invariant: a failed fusion holds nothing. Cost: passes over the chosen tokens and the query instead
of all tokens. In addition to the pools and the fused cache it needs memory for the buffer of a
single layer and for the layers in flight.
"""

from __future__ import annotations

import math
import numbers
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvtrie.errors import ConfigError
from kvtrie.fuse.backing import Leased, Tensors
from kvtrie.fuse.context import Context
from kvtrie.fuse.deviation import DeviationProfile
from kvtrie.fuse.fusion import Fusion, Settings
from kvtrie.fuse.gate import divergence, pass_gate
from kvtrie.fuse.log import Stopwatch
from kvtrie.fuse.memory import InMemory
from kvtrie.fuse.monitor import Monitor, Quality
from kvtrie.fuse.prefill import compute
from kvtrie.fuse.select import selection
from kvtrie.fuse.store import CacheStore
from kvtrie.settings.argument import few, instance, real, shown, whole
from kvtrie.tiers import sole_pool
from kvtrie.transfer.layerwise import LayerwiseEngine

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, Self

    from kvtrie import Lease
    from kvtrie.fuse.controller import Controller
    from kvtrie.fuse.fetch import Fetch
    from kvtrie.fuse.fusion import Deviation
    from kvtrie.fuse.layers import DecoderLayers
    from kvtrie.fuse.log import FusionLog
    from kvtrie.fuse.part import Part
    from kvtrie.fuse.select import Select

__all__ = ["Fused", "Fusor"]

_FUSED = b"fused"
_RATIO = 0.15
"""Default share of chunk tokens to recompute (CacheBlend)."""

_MOST = 2**32 - 1
_MOST_SEED = 2**64 - 1
_RANK_DEPTHS = (0.4, 0.65)
"""First and last ranking layer of "question", as shares of the depth."""


class Fused:
    """A fused sequence and its cache, a context manager. `Fusor.fuse` returns it.

    Args:
        fusion: the finished run.
        memory: memory of the fused cache.
        cache: the engine's cache over that memory.
        log: the record of the run.
        quality: the estimate of its result.

    Attributes:
        ids: int64 `(1, T)`, prefix, chunks and query, on the decoder's device.
        cache: cache object for the engine with all tokens but the last. It grows.
        lease: holds the blocks of the cache, never committed. `lease.slots(0)` is the block table.
            None without a store.
        log: reused and computed tokens, and times.
        quality: estimated closeness to a full prefill.
        cost_ns: device time of the recomputation, including selection passes, nanoseconds.
        deviation: for each layer with computed tokens, its chunk tokens by deviation.
    """

    def __init__(
        self,
        fusion: Fusion,
        memory: Leased | Tensors,
        cache: Any,  # noqa: ANN401 - the engine's own
        log: FusionLog,
        quality: Quality,
    ) -> None:
        self.ids: torch.Tensor = fusion.ids[None]
        self.cache = cache
        self.lease: Lease | None = memory.lease
        self.log = log
        self.quality = quality
        self.cost_ns: int = sum(log.nanoseconds.get(part, 0) for part in ("recompute", "scatter"))
        self.deviation: list[Deviation] = fusion.deviation
        self._memory = memory

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Fused({self.ids.shape[1]} tokens, {self.log.computed:.0%} of chunks computed)"

    def close(self) -> None:
        """Free its blocks at once. Idempotent. Later use of the cache raises `ClosedError`."""
        self._memory.close()


class Fusor:
    """Fuses chunks for one model.

    Args:
        decoder: the model, layer by layer.
        store: store of the chunks. None if all chunks come with their K and V.
        select: selection of tokens: a name or a function, see `kvtrie.fuse.select`, or a measured
            `DeviationProfile`. The rankings of a profile also narrow the tokens of further layers.
        ratio: share of chunk tokens to recompute. The first chunk after the prefix is exact, and
            its share goes to the rest of the chunks. A falling sequence has a ratio per layer from
            layer 0 on, the last for all further layers. Each layer then keeps the tokens with the
            largest deviation at the previous layer. A `DeviationProfile` gives its shares. By
            default the controller chooses, or without a controller .15.
        at: layer compared by "keys" and "values". All lower layers are computed in full. By default
            2, or the last layer of a smaller model.
        rank_layers: layers with the attention for "question", by default from 0.4 to 0.65 of the
            depth. The ranking pass of the query's tokens ends at the last of these layers.
        controller: chooses the ratio of each request unless `ratio` is given, and measures all
            fusions.
        monitor: watches the result and adds to the ratio.
        reserve: tokens after the query to reserve room for at once. Otherwise room grows with every
            pass.
        seed: seed of random choices.

    Raises:
        ConfigError: an unknown selection, ratios out of range or rising, missing layers, or a store
            with the KV of a different model.
    """

    def __init__(
        self,
        decoder: DecoderLayers,
        store: CacheStore | None = None,
        *,
        select: str | Select | DeviationProfile = "first+question",
        ratio: float | Sequence[float] | DeviationProfile | None = None,
        at: int | None = None,
        rank_layers: Sequence[int] | None = None,
        controller: Controller | None = None,
        monitor: Monitor | None = None,
        reserve: int = 0,
        seed: int = 0,
    ) -> None:
        layers = decoder.layers
        self.decoder = decoder
        self.store = None if store is None else instance("store", store, CacheStore)
        self.controller = controller
        self.monitor = None if monitor is None else instance("monitor", monitor, Monitor)
        if controller is not None and not hasattr(controller, "observe"):
            raise ConfigError(f"controller is {shown(controller)}, a Controller wanted")
        self._select = selection(select)
        self._profile = select if isinstance(select, DeviationProfile) else None
        given = (select, ratio, getattr(controller, "deviation", None))
        self._profiles = [each for each in given if isinstance(each, DeviationProfile)]
        if isinstance(ratio, DeviationProfile):
            if not ratio.shares:
                raise ConfigError("ratio is a deviation profile without shares")
            ratio = ratio.shares
        self._ratios = _ratios(_RATIO if ratio is None and controller is None else ratio)
        self._at = min(2, layers - 1) if at is None else whole("at", at, 0, layers - 1)
        self._rank_layers = _default_rank_layers(layers)
        if rank_layers is not None:
            given = few("rank_layers", rank_layers, layers)
            self._rank_layers = tuple(whole("rank_layers", one, 0, layers - 1) for one in given)
        if not self._rank_layers:
            raise ConfigError("rank_layers is (): at least one layer wanted")
        # The first fusion shows how many layers a selection function waits for.
        by_question = isinstance(select, str) and "question" in select.split("+")
        self._waits = max(self._rank_layers) + 1 if by_question else 0
        self._reserve = whole("reserve", reserve, 0, _MOST)
        self._seed = whole("seed", seed, 0, _MOST_SEED)
        self._check()

    def fuse(self, context: Context) -> Fused:
        """Fuse a context.

        Fusions over the same store take turns, across Fusors and threads, so that their loads do
        not wait for each other. Passes over fused caches do not wait for a fusion.

        Raises:
            ConfigError: a token without an embedding, the model does not pass the gate at this
                length or has changed since the store's KV was computed, or a chunk's own K and V
                do not fit the model.
            NoSpaceError: the first tier has no room. Nothing is held then.
            TransferError: required moves have failed.
        """
        with nullcontext() if self.store is None else self.store.lock:
            return self._in_turn(context)

    def _in_turn(self, context: Context) -> Fused:
        """Fuse a context while no other thread uses the store."""
        self._check()
        self._fits(instance("context", context, Context))
        prefix = np.empty(0, dtype=np.int64) if self.store is None else self.store.prefix
        vocabulary = self.decoder.vocabulary
        named = [(f"chunk {at}", chunk.tokens) for at, chunk in enumerate(context.chunks)]
        for name, tokens in (("the prefix", prefix), *named, ("the query", context.query)):
            if len(tokens) and tokens.max() >= vocabulary:
                raise ConfigError(
                    f"{name} has token {tokens.max()}, the model has embeddings of "
                    f"{vocabulary} tokens"
                )
        ids = np.concatenate([prefix, *(one.tokens for one in context.chunks), context.query])
        tokens = sum(len(chunk.tokens) for chunk in context.chunks)
        for profile in self._profiles:
            profile.check(tokens, self.decoder.layers)
        pass_gate(self.decoder, torch.as_tensor(ids, device=self.decoder.device))
        if self.store is None:
            return self._fuse(InMemory(context.chunks), self._tensors(len(ids)), context)
        executor = self.store.executor
        before = executor.manager.stats()
        with self.store.fetch_many(context.chunks) as fetch:
            lease = executor.manager.acquire(
                ids,
                now=executor.clock(),
                scope=replace(self.store.scope, extra=((0, _FUSED),)),
                keep=0,
                reserve=self._reserve,
                load="none",
            )
            try:
                executor.wait(lease)
                memory = Leased(executor, lease)
            except BaseException:
                lease.release(now=executor.clock())
                raise
            fused = self._fuse(fetch, memory, context)
        lanes = executor.manager.stats().since(before).lanes
        fused.log.load_ns = sum(lane.busy_ns for lane in lanes.values())
        if self.controller is not None:
            first, stop = fused.log.span
            self.controller.observe(
                fused.cost_ns,
                pairs=int(fused.log.grid.sum()),
                layers_full=fused.log.layers_full,
                tokens=stop - first,
                query=len(context.query),
                waits=fused.log.waits,
            )
        return fused

    def _fuse(self, fetch: Fetch | InMemory, memory: Leased | Tensors, context: Context) -> Fused:
        decoder, monitor = self.decoder, self.monitor
        watch = Stopwatch(decoder.device)
        fates: dict[int, str] = {}

        def compute_absent() -> None:
            if not isinstance(fetch, InMemory):
                for part in fetch.absent():
                    fates[id(part)] = part.state
                    self._compute(fetch, part)

        try:
            with watch.part("absent"):
                compute_absent()
            settings = Settings(
                self._select,
                self._ratios_for(fetch, context),
                at=self._at,
                rank_layers=self._rank_layers,
                probe=0 if monitor is None else monitor.probe,
                seed=self._seed,
                profile=self._profile,
            )
            fusion = Fusion(
                decoder,
                fetch,
                memory,
                context.query,
                settings=settings,
                watch=watch,
                compute_lost=compute_absent,
            )
            fusion.run()
            log = fusion.finish(fates)
            self._waits = log.waits or self._waits
            quality = fusion.quality()
            if monitor is not None:
                if monitor.samples():
                    kl = divergence(decoder.prefill(fusion.ids), fusion.logits())
                    quality = Quality(math.exp(-kl), "full prefill", kl)
                monitor.observe(quality)
            memory.done()
            return Fused(fusion, memory, decoder.cache(memory, fusion.length - 1), log, quality)
        except BaseException:
            memory.close()
            raise

    def _compute(self, fetch: Fetch, part: Part) -> None:
        """Compute a part directly after the prefix and keep it."""
        compute(
            self.decoder,
            torch.as_tensor(part.sequence, device=self.decoder.device),
            partial(fetch.write, part),
            start=part.start,
            past=partial(fetch.past, part),
        )
        fetch.keep(part)

    def _ratios_for(self, fetch: Fetch | InMemory, context: Context) -> tuple[float, ...]:
        ratios = self._ratios
        if not ratios:
            if self.controller is None or isinstance(fetch, InMemory):
                raise ConfigError("a controller chooses ratios for chunks of a store: give a ratio")
            ratio = self.controller.ratio(fetch, len(context.query), waits=self._waits)
            measured = getattr(self.controller, "deviation", None)
            if measured is None:
                ratios = (ratio,)
            else:
                ratios = measured.scaled(ratio, self.decoder.layers, self.controller.ceiling)
        if self.monitor is not None:
            ratios = tuple(self.monitor.ratio(one) for one in ratios)
        return ratios

    def _tensors(self, tokens: int) -> Tensors:
        decoder = self.decoder
        room = tokens + self._reserve
        return Tensors(decoder.layers, decoder.widths, room, decoder.dtype, decoder.device)

    def _check(self) -> None:
        """Refuse a store with the KV of a different model or the first tier on another device."""
        if self.store is None:
            return
        executor = self.store.executor
        mine, theirs = self.decoder.identity(), executor.manager.model.fingerprint
        if mine != theirs:
            raise ConfigError(
                f"the store keeps KV of {theirs!r}, this model is {mine!r}: other weights, "
                "adapters or RoPE settings make other KV; use a separate store"
            )
        pool = sole_pool(executor.pools[0], "that a model could compute in")
        LayerwiseEngine.of(executor)  # refuses settings not supported by fusion
        heads, *dims = self.decoder.widths
        of_model = (self.decoder.layers, heads, *dims, self.decoder.dtype, self.decoder.device.type)
        keys, values = pool.keys, pool.values
        of_store = (pool.layers, *keys.shape[1:], values.shape[2], keys.dtype, pool.device.type)
        if of_model != of_store:
            raise ConfigError(
                f"(layers, KV heads, K and V head_dim, dtype, device) of the model are {of_model}, "
                f"of the store's first tier {of_store}"
            )

    def _fits(self, context: Context) -> None:
        """Refuse chunks with K and V of wrong shapes or formats."""
        heads, *dims = self.decoder.widths
        for at, chunk in enumerate(context.chunks):
            if chunk.kv is None:
                continue
            wanted = [(len(chunk.tokens), heads, dim) for dim in dims]
            if len(chunk.kv) != self.decoder.layers:
                raise ConfigError(
                    f"chunk {at} comes with K and V of {len(chunk.kv)} layers, the model has "
                    f"{self.decoder.layers}"
                )
            for layer, pair in enumerate(chunk.kv):
                shapes = [tuple(each.shape) for each in pair]
                if shapes != wanted:
                    raise ConfigError(
                        f"chunk {at} comes with K and V of {shapes} at layer {layer}, {wanted} "
                        "wanted"
                    )


def _default_rank_layers(layers: int) -> tuple[int, ...]:
    """Return the default ranking layers of "question"."""
    low, high = (int(part * layers) for part in _RANK_DEPTHS)
    return tuple(range(low, high + 1))


def _ratios(given: object) -> tuple[float, ...]:
    """Check a ratio or a falling sequence of ratios. None leaves the choice to a controller."""
    if given is None:
        return ()
    if isinstance(given, (numbers.Real, str, bytes)):
        return (real("ratio", given, 0, 1),)
    ratios = tuple(
        real(f"ratio[{at}]", one, 0, 1) for at, one in enumerate(few("ratio", given, _MOST))
    )
    if not ratios or any(one < other for one, other in pairwise(ratios)):
        raise ConfigError(f"ratio is {shown(given)}: one wanted, or several that fall")
    return ratios
