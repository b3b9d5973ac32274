"""Controller: chooses how many tokens to recompute, and the tier of new chunks.

Layer i is computed while layer i + 1 loads, so recomputation costs nothing until it takes longer
than loading. `r = max(r_eq, r*)`, with `T_recompute(r_eq) = T_load` (CacheBlend, section 5.1) and
r* the smallest ratio with correct answers. A selection by the question reads its layers before any
token is recomputed. Nothing hides this wait, and recomputation hides only the later loads. New
chunks go to the cheapest tier with loads short enough to be hidden by recomputation at r*.
Invariant: a lane counts with its measured speed after its first transfer, before that with the
profile's speed or else the declared speed. A ratio is from floor to ceiling. Cost: some forty
look-ups in the profile's table per request.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvtrie.errors import ConfigError
from kvtrie.fuse.deviation import DeviationProfile
from kvtrie.fuse.profile import Profile
from kvtrie.fuse.store import CacheStore
from kvtrie.settings.argument import instance, real, whole
from kvtrie.tiers import Pool

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvtrie import Lane, Tier
    from kvtrie.fuse.fetch import Fetch
    from kvtrie.fuse.store import Kind

__all__ = ["Controller", "Estimate"]

_NS = 1_000_000_000
_HALVINGS = 20  # of the interval of ratios: to a millionth
_MOVES_PER_JOB = 64  # blocks per copy between memories
_FRESH = 0.3  # weight of the newest measurement


@dataclass(frozen=True, slots=True)
class Estimate:
    """Expected times of the last request, and the ratio chosen for it.

    Attributes:
        wait_ns: wait of the selection for its layers, beyond its own passes and the load of the
            first layer, nanoseconds. No ratio hides it.
        load_ns: T_load, nanoseconds: loads that recomputation can hide. Leaves out the first layer
            and all loads finished by the end of the selection.
        recompute_ns: T_recompute at the ratio, nanoseconds: passes over chosen tokens and query,
            full first layers, and the layout of reused K and V. Leaves out the last layer, because
            no load runs during it.
        r_eq: ratio at which `load_ns` equals `recompute_ns`. 0 if even the query takes longer than
            loading, 1 if full recomputation takes less.
        ratio: the chosen ratio.
    """

    wait_ns: float
    load_ns: float
    recompute_ns: float
    r_eq: float
    ratio: float


@dataclass(slots=True)
class Controller:
    """Ratios and tiers for the fusions of a store.

    Args:
        profile: of this machine and model. `passes` is required. `device` gives the time of laying
            out a layer. Its lanes replace the declared lanes of the tiers.
        store: source of the chunks. Each call of `observe` sets `store.tier`.
        floor: r*, the smallest ratio, .15 by CacheBlend. With `deviation`, at least the mean of its
            shares.
        ceiling: the largest ratio.
        layers_full: number of first layers at which all chunk tokens are computed. None takes the
            number of the last fusion, 0 before the first fusion.
        slack: largest share of recomputation time by which loads may exceed it for a tier to be
            chosen. The excess is weighted by the hit rate of chunks.
        deviation: a measured profile with shares. Layers divide the ratio of a request in
            proportion to the shares, and the floor is at least their mean.

    Attributes:
        tier: kind of the tier for new chunks. The first tier keeps them in place.
        pace: measured recomputation time relative to the profile.
        estimate: estimate of the last request.

    Raises:
        ConfigError: a profile without passes, or a number out of range.
    """

    profile: Profile
    store: CacheStore
    floor: float = 0.15
    ceiling: float = 1.0
    layers_full: int | None = None
    slack: float = 0.05
    deviation: DeviationProfile | None = None
    tier: Kind = field(init=False)
    pace: float = field(init=False, default=1.0)
    estimate: Estimate | None = field(init=False, default=None)
    _full: int = field(init=False, default=0)
    _waits: int = field(init=False, default=0)
    _usual: tuple[float, float] | None = field(init=False, default=None)
    _found: float = field(init=False, default=1.0)
    _counted: tuple[int, int] = field(init=False, default=(0, 0))

    def __post_init__(self) -> None:
        instance("profile", self.profile, Profile)
        layers = instance("store", self.store, CacheStore).executor.manager.model.layers
        if self.profile.passes is None:
            raise ConfigError("the profile has no passes: write it with `kvtrie profile --model`")
        for name in ("floor", "ceiling"):
            setattr(self, name, real(name, getattr(self, name), 0, 1))
        if self.deviation is not None:
            if not instance("deviation", self.deviation, DeviationProfile).shares:
                raise ConfigError("deviation is a profile without shares, which ratios come from")
            self.floor = min(self.ceiling, max(self.floor, self.deviation.share(layers)))
        if self.floor > self.ceiling:
            raise ConfigError(f"floor is {self.floor}, above the ceiling {self.ceiling}")
        self.slack = real("slack", self.slack, 0, math.inf)
        if self.layers_full is not None:
            self.layers_full = whole("layers_full", self.layers_full, 0, layers)
        self._full = self.layers_full or 0
        self.tier = self.store.tier or self.store.executor.manager.tiers[0].kind
        feedback = self.store.feedback()
        self._counted = (feedback.chunks, feedback.missed)

    def ratio(self, fetch: Fetch, query: int, *, waits: int = 0) -> float:
        """Return the share of the chunks' tokens to recompute in a request.

        Args:
            fetch: its chunks. Their current tiers decide the loading time.
            query: tokens of its query, computed at every layer.
            waits: layers read by the query's selection pass before the first token is recomputed.
        """
        tokens = sum(len(fetch.parts[at].tokens) for at in fetch.order)
        counted = [part for part in (fetch.prefix, *fetch.parts) if part is not None]
        blocks: dict[str, int] = {}
        for part in counted:
            for kind, many in part.blocks.items():
                blocks[kind] = blocks.get(kind, 0) + many
        wait, load = self._split(self._layer_ns(blocks), waits, tokens, query)

        def recompute(ratio: float) -> float:
            return self.recompute_ns(ratio, tokens, query)

        r_eq = _crossing(recompute, load)
        ratio = min(self.ceiling, max(self.floor, r_eq))
        self.estimate = Estimate(wait, load, recompute(ratio), r_eq, ratio)
        self._usual = _blend(self._usual, (float(tokens), float(query)))
        return ratio

    def observe(
        self,
        recompute_ns: int,
        *,
        pairs: int,
        layers_full: int,
        tokens: int,
        query: int,
        waits: int = 0,
    ) -> None:
        """Update later ratios and the tier of new chunks from the measurements of a fusion.

        Args:
            recompute_ns: time of its passes, including selection passes.
            pairs: computed (token, layer) pairs, including the query's.
            layers_full: layers at which all chunk tokens were computed.
            tokens: tokens of all chunks.
            query: tokens of the query.
            waits: layers of the query's selection pass.
        """
        layers = self.store.executor.manager.model.layers
        left = max(0, pairs - layers_full * (tokens + query))
        rest = left / max(1, layers - layers_full)
        expected = self._passes(layers_full, tokens + query, layers - layers_full, rest, tokens)
        expected += waits * self._query_ns(tokens, query)
        if expected > 0 and recompute_ns > 0:
            self.pace += _FRESH * (recompute_ns / expected - self.pace)
        if self.layers_full is None:
            self._full = layers_full
        self._waits = waits
        feedback = self.store.feedback()
        chunks, missed = feedback.chunks - self._counted[0], feedback.missed - self._counted[1]
        self._counted = (feedback.chunks, feedback.missed)
        if chunks:
            self._found += _FRESH * (1 - missed / chunks - self._found)
        self._usual = _blend(self._usual, (float(tokens), float(query)))
        self._choose()

    def load_ns(self, blocks: Mapping[str, int]) -> float:
        """Return the time of loading all layers but the first, in nanoseconds.

        Args:
            blocks: number of blocks to load, by kind of tier. Blocks below the host pass through
                host memory and occupy both lanes. Lanes run in parallel unless they share a queue.
        """
        return (self.store.executor.manager.model.layers - 1) * self._layer_ns(blocks)

    def _layer_ns(self, blocks: Mapping[str, int]) -> float:
        """Return the time from the arrival of a layer to the arrival of the next, nanoseconds."""
        executor = self.store.executor
        manager, layers = executor.manager, executor.manager.model.layers
        layer_bytes = manager.model.layer_bytes(manager.block_tokens)
        queues: dict[str, float] = {}
        for tier, pool in list(zip(manager.tiers, executor.pools, strict=True))[1:]:
            carried = blocks.get(tier.kind, 0)
            if tier.kind == "host":
                carried += sum(blocks.get(kind, 0) for kind in ("disk", "remote"))
            if not carried:
                continue
            lane, seen = self._lane(tier)
            copies = -(-carried // _MOVES_PER_JOB) if isinstance(pool, Pool) else carried
            # Declared latencies are per block with all its layers.
            waits = lane.latency_ns * (copies if seen else carried / layers)
            queue = lane.shares or lane.name
            took = waits + carried * layer_bytes * _NS / lane.bytes_per_s
            queues[queue] = queues.get(queue, 0.0) + took
        return max(queues.values(), default=0.0)

    def _split(
        self, layer_ns: float, waits: int, tokens: float, query: float
    ) -> tuple[float, float]:
        """Split the loading time into the wait of the selection and the loads left to hide.

        The query's pass at a layer begins after the previous pass and the load of the layer. The
        last of `waits` passes therefore ends after the sum of all passes or after the last load,
        whichever is later. Loading goes on throughout.
        """
        layers = self.store.executor.manager.model.layers
        begun = ended = layer_ns
        if waits:
            each = self.pace * self._query_ns(tokens, query) + self._layout_ns(tokens + query)
            begun += waits * each
            ended = max(begun, waits * layer_ns + each)
        return ended - begun, max(0.0, layers * layer_ns - ended)

    def _query_ns(self, tokens: float, query: float) -> float:
        """Return the profile's time of a query pass at a single layer, in nanoseconds."""
        passes = self.profile.passes
        assert passes is not None  # noqa: S101 - checked on creation
        before = len(self.store.prefix) + tokens
        return passes.pass_ns(query, before) / self.store.executor.manager.model.layers

    def recompute_ns(self, ratio: float, tokens: int, query: int) -> float:
        """Return T_recompute, the time of all layers but the last, in nanoseconds.

        Args:
            ratio: share of the chunks' tokens.
            tokens: tokens of the chunks.
            query: tokens of the query.
        """
        layers = self.store.executor.manager.model.layers
        full = min(self._full, layers - 1)
        chosen = ratio * tokens + query
        took = self._passes(full, tokens + query, layers - 1 - full, chosen, tokens)
        return self.pace * took + (layers - 1) * self._layout_ns(tokens + query)

    def _passes(
        self, full: int, all_tokens: float, others: int, chosen: float, context: float
    ) -> float:
        """Return the time of `full` layers over all tokens and `others` over the chosen tokens."""
        passes = self.profile.passes
        assert passes is not None  # noqa: S101 - checked on creation
        layers = self.store.executor.manager.model.layers
        before = len(self.store.prefix) + context
        of_all = passes.pass_ns(all_tokens, len(self.store.prefix))
        return (full * of_all + others * passes.pass_ns(chosen, before)) / layers

    def _layout_ns(self, tokens: float) -> float:
        """Return the time of copying a layer's K and V, 0 without a measured device."""
        if self.profile.device is None:
            return 0.0
        manager = self.store.executor.manager
        each = manager.model.block_bytes(manager.block_tokens) / manager.block_tokens
        moved = 2 * tokens * each / manager.model.layers
        return moved * _NS / self.profile.device.memory_bytes_per_s

    def _lane(self, tier: Tier) -> tuple[Lane, bool]:
        """Return a tier's load lane, in bytes of the model's KV format, and if it was measured."""
        declared, _ = tier.lanes()
        seen = self.store.executor.feedback.lanes().get(declared.name)
        lane = seen or self.profile.lanes.get(declared.name, declared)
        manager = self.store.executor.manager
        return tier.pace(lane, manager.model, manager.block_tokens), seen is not None

    def _choose(self) -> None:
        """Choose the cheapest tier with hidden loads; the last tier of the list is the cheapest."""
        assert self._usual is not None  # noqa: S101 - `observe` has set it
        manager = self.store.executor.manager
        tokens, query = map(round, self._usual)
        hidden = self.recompute_ns(self.floor, tokens, query)
        blocks = -(-tokens // manager.block_tokens)
        self.tier = manager.tiers[0].kind
        for tier in reversed(manager.tiers[1:]):
            layer_ns = self._layer_ns({tier.kind: blocks})
            wait, load = self._split(layer_ns, self._waits, tokens, query)
            out = wait + max(0.0, load - hidden)
            if tier.write != "never" and self._found * out <= self.slack * hidden:
                self.tier = tier.kind
                break
        self.store.tier = self.tier


def _crossing(recompute: Callable[[float], float], load: float) -> float:
    """Return the ratio from 0 to 1 at which recomputation takes as long as loading."""
    low, high = 0.0, 1.0
    if recompute(low) >= load:
        return low
    if recompute(high) <= load:
        return high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if recompute(middle) <= load else (low, middle)
    return low


def _blend(before: tuple[float, float] | None, now: tuple[float, float]) -> tuple[float, float]:
    if before is None:
        return now
    return (
        before[0] + _FRESH * (now[0] - before[0]),
        before[1] + _FRESH * (now[1] - before[1]),
    )
