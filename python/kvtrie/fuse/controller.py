"""Controller: chooses how many tokens to recompute, and the tier of new chunks.

Recomputation that is no longer than loading costs nothing: layer i is computed while layer i + 1
loads. `r = max(r_eq, r*)`, where `T_recompute(r_eq) = T_load` (CacheBlend, section 5.1) and r* is
the least that keeps answers right. A selection by the question reads its layers before anything is
recomputed: nothing hides its wait, and recomputation hides only the loads after it. New chunks go
to the cheapest tier whose loads recomputation at r* still hides.
Invariant: a lane counts with its measured speed once it has carried something, before that with
the profile's or else the declared speed; a ratio is from floor to ceiling. Cost: some forty
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
_MOVES_PER_JOB = 64  # blocks that memory hands on in one copy
_FRESH = 0.3  # weight of the newest of what is seen


@dataclass(frozen=True, slots=True)
class Estimate:
    """Expected times of the last request, and the ratio chosen for it.

    Attributes:
        wait_ns: how long the selection waits for the layers that it reads, beyond its own passes
            and the load of the first layer, nanoseconds. No ratio hides it.
        load_ns: T_load: the loads that recomputation can hide, nanoseconds: those of all layers
            but the first, less what is loaded by the end of the selection.
        recompute_ns: T_recompute at the ratio: passes of all layers but the last, which hide
            nothing, with the query, full first layers and the layout of reused K and V.
        r_eq: the ratio at which they are equal; 0 where even the query takes longer than loading, 1
            where recomputing all of it takes less.
        ratio: what was chosen.
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
        profile: of this machine and model. `passes` is required; `device` gives the time of laying
            out a layer; its lanes replace those that the tiers declare.
        store: whose chunks; `store.tier` is set by each call of `saw`.
        floor: r*, the least ratio; .15 by CacheBlend. With `deviation` the mean of its shares,
            where that is larger.
        ceiling: the largest ratio.
        layers_full: first layers at which all of the chunks' tokens are computed; None takes what
            the last fusion did, and none until then.
        slack: a tier still hides where what is expected to stick out, times the share of chunks
            that are found again, is at most this share of recomputation.
        deviation: a measured profile with shares: the ratio of a request is their mean, and each
            layer has its part of it.

    Attributes:
        tier: kind of the tier for new chunks; that of the first tier leaves them there.
        pace: how much longer recomputation was seen to take than the profile says.
        estimate: of the last request.

    Raises:
        ConfigError: a profile without passes, or numbers that cannot be.
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
            fetch: its chunks; what of them is loaded, and from where, is taken as it is now.
            query: tokens of its query, which are computed at every layer.
            waits: layers that the query's pass, which selects, reads before the first token is
                recomputed.
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

    def saw(
        self,
        recompute_ns: int,
        *,
        pairs: int,
        layers_full: int,
        tokens: int,
        query: int,
        waits: int = 0,
    ) -> None:
        """Take the measurements of a fusion; later ratios and the tier of new chunks follow them.

        Args:
            recompute_ns: time of its passes, those made to select included.
            pairs: (token, layer) pairs that it computed, the query's included.
            layers_full: layers at which all of the chunks' tokens were computed.
            tokens: tokens of all chunks.
            query: tokens of the query.
            waits: layers of the query's pass that selected.
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
            blocks: how many blocks come from each kind of tier. Those below the host pass through
                it, on both lanes at once; lanes work side by side, those that share a queue do not.
        """
        return (self.store.executor.manager.model.layers - 1) * self._layer_ns(blocks)

    def _layer_ns(self, blocks: Mapping[str, int]) -> float:
        """Nanoseconds from the arrival of one layer to that of the next."""
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
            # Declared latencies are per block, whatever the number of its layers.
            waits = lane.latency_ns * (copies if seen else carried / layers)
            queue = lane.shares or lane.name
            took = waits + carried * layer_bytes * _NS / lane.bytes_per_s
            queues[queue] = queues.get(queue, 0.0) + took
        return max(queues.values(), default=0.0)

    def _split(
        self, layer_ns: float, waits: int, tokens: float, query: float
    ) -> tuple[float, float]:
        """Split the time of loading into what the selection waits and what it leaves to hide.

        The query's pass at a layer begins when the pass before it has ended and the layer is there,
        so the last of `waits` passes ends after all of them or after the last load, whichever takes
        longer. Loading goes on throughout.
        """
        layers = self.store.executor.manager.model.layers
        begun = ended = layer_ns
        if waits:
            each = self.pace * self._query_ns(tokens, query) + self._layout_ns(tokens + query)
            begun += waits * each
            ended = max(begun, waits * layer_ns + each)
        return ended - begun, max(0.0, layers * layer_ns - ended)

    def _query_ns(self, tokens: float, query: float) -> float:
        """A pass of the query at one layer, by the profile."""
        passes = self.profile.passes
        assert passes is not None  # noqa: S101 - looked at when this was made
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
        """Passes of some layers over all tokens, and of others over the chosen ones."""
        passes = self.profile.passes
        assert passes is not None  # noqa: S101 - looked at when this was made
        layers = self.store.executor.manager.model.layers
        before = len(self.store.prefix) + context
        of_all = passes.pass_ns(all_tokens, len(self.store.prefix))
        return (full * of_all + others * passes.pass_ns(chosen, before)) / layers

    def _layout_ns(self, tokens: float) -> float:
        """Reading and writing a layer's K and V of the context, where the device was measured."""
        if self.profile.device is None:
            return 0.0
        manager = self.store.executor.manager
        each = manager.model.block_bytes(manager.block_tokens) / manager.block_tokens
        moved = 2 * tokens * each / manager.model.layers
        return moved * _NS / self.profile.device.memory_bytes_per_s

    def _lane(self, tier: Tier) -> tuple[Lane, bool]:
        """The lane up from a tier, in bytes of the model's own KV, and whether it was seen."""
        declared, _ = tier.lanes()
        seen = self.store.executor.feedback.lanes().get(declared.name)
        lane = seen or self.profile.lanes.get(declared.name, declared)
        manager = self.store.executor.manager
        return tier.pace(lane, manager.model, manager.block_tokens), seen is not None

    def _choose(self) -> None:
        """The last tier in the list is the cheapest; the first that hides is taken."""
        assert self._usual is not None  # noqa: S101 - `saw` has set it
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
    """The ratio from 0 to 1 at which recomputing takes as long as loading."""
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
