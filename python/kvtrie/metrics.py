"""Metrics for Prometheus: every counter of the managers, read when they are scraped.

`pip install 'kvtrie[metrics]'`. docs/metrics.md maps the names to the metrics of vLLM and SGLang.
Invariant: a scrape changes nothing, and a closed or broken manager shows as `kvtrie_up` 0 without
ending the scrape. Cost: some milliseconds per manager and scrape, including ten microseconds under
the manager's lock. No cost between scrapes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, cast

try:
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
    )
    from prometheus_client.registry import Collector as _Base
except ImportError as error:
    raise ImportError("metrics need: pip install 'kvtrie[metrics]'") from error

from kvtrie._kvtrie import BlockManager
from kvtrie.errors import ClosedError, ConfigError, InvariantError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from kvtrie._kvtrie import Histogram, Stats, TierStats

__all__ = [
    "KEPT_METRICS",
    "METRICS",
    "MISSED_METRICS",
    "REMOTE_METRICS",
    "Collector",
    "Metric",
    "Serving",
]

_Family: TypeAlias = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
_Type: TypeAlias = Literal["counter", "gauge", "histogram"]

_NS = 1_000_000_000
# 1, 2, 5, 10, ... microseconds to 100 seconds, and milliseconds to a day.
_LATENCIES = (*(m * 10**e for e in range(3, 11) for m in (1, 2, 5)), 10**11)
_AGES = (*(m * 10**e for e in range(6, 14) for m in (1, 2, 5)), 86_400 * _NS)

_BY_MANAGER = ("machine",)
_BY_LANE = ("machine", "lane")
_BY_TIER = ("machine", "tier", "policy")


@dataclass(frozen=True, slots=True)
class Metric:
    """An exported metric.

    Attributes:
        name: its name in a scrape, with `_total` for a counter.
        type: counter, gauge or histogram.
        meaning: the help text.
        of: its attribute of `Stats`, `LaneStats` or `TierStats`.
        labels: the names of its labels.
        scale: units of the attribute in a unit of the metric.
    """

    name: str
    type: _Type
    meaning: str
    of: str
    labels: tuple[str, ...] = _BY_TIER
    scale: int = 1


METRICS = (
    Metric(
        "kvtrie_up", "gauge", "1 while the manager serves, 0 once it is closed or broken",
        "", _BY_MANAGER,
    ),
    Metric(
        "kvtrie_time_seconds", "gauge", "Latest time seen by the manager, on its clock",
        "now", _BY_MANAGER, _NS,
    ),
    Metric(
        "kvtrie_requests_total", "counter", "Requests with a lease",
        "requests", _BY_MANAGER,
    ),
    Metric(
        "kvtrie_refused_requests_total", "counter", "Requests that did not fit",
        "refused", _BY_MANAGER,
    ),
    Metric(
        "kvtrie_requested_blocks_total", "counter", "Full blocks of the prompts of requests",
        "blocks_wanted", _BY_MANAGER,
    ),
    Metric(
        "kvtrie_requested_tokens_total", "counter", "Tokens of the prompts of requests",
        "tokens_wanted", _BY_MANAGER,
    ),
    Metric(
        "kvtrie_inserted_blocks_total", "counter", "Blocks added to the trie by a commit",
        "inserted", _BY_MANAGER,
    ),
    Metric(
        "kvtrie_duplicate_blocks_total", "counter", "Blocks computed again by a second request",
        "duplicates", _BY_MANAGER,
    ),
    Metric(
        "kvtrie_lost_failure_rows_total", "counter", "Rows of failures overwritten untaken",
        "failed_lost", _BY_MANAGER,
    ),
    Metric(
        "kvtrie_clamped_calls_total", "counter", "Calls with a time below the latest time",
        "clamped", _BY_MANAGER,
    ),
    Metric(
        "kvtrie_doubted_calls_total", "counter", "Calls with a time a day beyond the latest time",
        "doubted", _BY_MANAGER,
    ),
    Metric("kvtrie_known_blocks", "gauge", "Blocks in the trie", "blocks", _BY_MANAGER),
    Metric("kvtrie_leases", "gauge", "Leases held", "leases", _BY_MANAGER),
    Metric("kvtrie_pending_moves", "gauge", "Moves that have not ended", "moves", _BY_MANAGER),
    Metric(
        "kvtrie_queued_moves", "gauge", "Moves waiting to be handed out", "queued", _BY_MANAGER
    ),
    Metric(
        "kvtrie_lane_busy_seconds_total", "counter",
        "Measured busy time of the lane",
        "busy_ns", _BY_LANE, _NS,
    ),
    Metric(
        "kvtrie_lane_predicted_seconds_total", "counter",
        "Time of the lane's transmissions at its declared speed",
        "predicted_ns", _BY_LANE, _NS,
    ),
    Metric("kvtrie_lane_bytes_total", "counter", "Bytes given to the lane", "bytes", _BY_LANE),
    Metric("kvtrie_hit_blocks_total", "counter", "Blocks found here by requests", "hits"),
    Metric(
        "kvtrie_miss_blocks_total", "counter", "Blocks found neither here nor on a faster tier",
        "misses",
    ),
    Metric("kvtrie_hit_tokens_total", "counter", "Tokens found here by requests", "tokens_hit"),
    Metric(
        "kvtrie_evictions_total", "counter", "Evictions by their cause",
        "evictions", (*_BY_TIER, "cause"),
    ),
    Metric(
        "kvtrie_eviction_outcomes_total", "counter", "Evictions by the fate of the copy",
        "", (*_BY_TIER, "outcome"),
    ),
    Metric(
        "kvtrie_evicted_bytes_total", "counter", "Bytes freed by evictions", "bytes_freed"
    ),
    Metric("kvtrie_demotions_total", "counter", "Stores of a block begun into here", "demoted"),
    Metric("kvtrie_promotions_total", "counter", "Loads of a block begun out of here", "promoted"),
    Metric("kvtrie_read_bytes_total", "counter", "Bytes read from here by moves", "bytes_read"),
    Metric(
        "kvtrie_written_bytes_total", "counter", "Bytes written to here by moves", "bytes_written"
    ),
    Metric("kvtrie_moves_total", "counter", "Started moves into here", "moves"),
    Metric("kvtrie_failed_moves_total", "counter", "Failed moves into here", "failed"),
    Metric(
        "kvtrie_compared_victims_total", "counter",
        "Victims compared by an audit with the minimum by unrounded costs",
        "compared",
    ),
    Metric(
        "kvtrie_regrets_total", "counter", "Compared victims with a value above the minimum",
        "regrets",
    ),
    Metric("kvtrie_slots", "gauge", "All slots", "slots"),
    Metric("kvtrie_free_slots", "gauge", "Slots that can be written at once", "free"),
    Metric("kvtrie_coming_slots", "gauge", "Slots that only a store still reads", "coming"),
    Metric("kvtrie_evictable_copies", "gauge", "Copies that could be victims", "evictable"),
    Metric("kvtrie_copies", "gauge", "Blocks with a copy here", "copies"),
    Metric("kvtrie_clean_copies", "gauge", "Copies that could leave without a loss", "clean"),
    Metric("kvtrie_dirty_copies", "gauge", "Copies that could not", "dirty"),
    Metric("kvtrie_retained_copies", "gauge", "Copies retained by a hint", "retained"),
    Metric(
        "kvtrie_group_held_slots", "gauge",
        "Slots of a group of layers held by leases and resume points",
        "held", (*_BY_TIER, "group"),
    ),
    Metric(
        "kvtrie_group_released_slots", "gauge",
        "Slots of a group that are found until they are taken",
        "released", (*_BY_TIER, "group"),
    ),
    Metric(
        "kvtrie_hit_age_seconds", "histogram", "Since the last use, of blocks found here",
        "hit_age", scale=_NS,
    ),
    Metric(
        "kvtrie_eviction_age_seconds", "histogram", "Since the last use, of copies that left",
        "evict_age", scale=_NS,
    ),
    Metric(
        "kvtrie_move_seconds", "histogram",
        "From handing a move out to its end: loads from here, stores to here, copies within",
        "", (*_BY_TIER, "kind"), _NS,
    ),
)  # fmt: skip
"""All metrics of a manager exported by `Collector`."""

KEPT_METRICS = (
    Metric(
        "kvtrie_host_kept_blocks", "gauge",
        "Blocks of the host tier that the next process would find",
        "kept_blocks", _BY_MANAGER,
    ),
    Metric(
        "kvtrie_host_lost_blocks_total", "counter",
        "Missed blocks of earlier processes, by reason",
        "lost_blocks", (*_BY_MANAGER, "reason"),
    ),
)  # fmt: skip
"""Metrics of an executor's pools exported by `Collector`, for a host tier with `keep`."""

MISSED_METRICS = (
    Metric(
        "kvtrie_missed_tokens_total", "counter", "Prompt tokens computed by engines, by cause",
        "missed_tokens", (*_BY_MANAGER, "cause"),
    ),
)  # fmt: skip
"""Metrics of executors exported by `Collector`, for engines with causes, as `KvtrieCache`."""


REMOTE_METRICS = (
    Metric(
        "kvtrie_remote_results_total", "counter",
        "Blocks of operations on the shared store, by operation and outcome",
        "results", (*_BY_MANAGER, "operation", "outcome"),
    ),
    Metric(
        "kvtrie_remote_read_bytes_total", "counter", "Bytes read from the shared store, verified",
        "bytes_read", _BY_MANAGER,
    ),
    Metric(
        "kvtrie_remote_written_bytes_total", "counter",
        "Bytes of blocks found or written by a put in the shared store",
        "bytes_written", _BY_MANAGER,
    ),
    Metric(
        "kvtrie_remote_refuted_beliefs_total", "counter",
        "Blocks believed to be in the shared store but missing",
        "refuted", _BY_MANAGER,
    ),
    Metric(
        "kvtrie_remote_dropped_blocks_total", "counter",
        "Blocks evicted before the shared store had them, by reason",
        "dropped", (*_BY_MANAGER, "reason"),
    ),
    Metric(
        "kvtrie_remote_breaker_open", "gauge",
        "1 while the circuit breaker of the shared store is open or probes",
        "breaker", _BY_MANAGER,
    ),
    Metric(
        "kvtrie_remote_write_breaker_open", "gauge",
        "1 while the circuit breaker of puts is open or probes: no block is stored",
        "writes", _BY_MANAGER,
    ),
)  # fmt: skip
"""Metrics of an executor's pools exported by `Collector`, for a remote tier with a path."""


class Serving(Protocol):
    """A manager with its pools: an `Executor`."""

    manager: BlockManager

    @property
    def pools(self) -> Sequence[object]:
        """The pool or storage of each tier."""
        ...


class Collector(_Base):
    """Exports the counters of managers, and of kept pools of executors.

    Register it (`prometheus_client.REGISTRY.register(Collector(manager))`) and start an exporter,
    for example `prometheus_client.start_http_server`. Managers differ by their machine's number,
    tiers by kind and policy.
    """

    def __init__(self, managers: BlockManager | Serving | Iterable[BlockManager | Serving]) -> None:
        """Takes a manager or executor, or several.

        Raises:
            ConfigError: no manager, or two managers with the same machine number.
        """
        single = isinstance(managers, BlockManager) or hasattr(managers, "manager")
        given = cast("tuple[Any, ...]", (managers,) if single else tuple(cast("Any", managers)))
        self._pools: dict[BlockManager, Sequence[Any]] = {
            one if isinstance(one, BlockManager) else one.manager: getattr(one, "pools", ())
            for one in given
        }
        self._missed: dict[BlockManager, Mapping[str, int]] = {
            one.manager: one.missed_tokens for one in given if hasattr(one, "missed_tokens")
        }
        self._managers = tuple(
            one if isinstance(one, BlockManager) else one.manager for one in given
        )
        machines = [manager.machine for manager in self._managers]
        if not machines or len(set(machines)) < len(machines):
            raise ConfigError(f"managers of machines {machines}: each once, and at least one")

    def describe(self) -> Iterator[_Family]:
        """Return all families without a sample: registering reads no manager."""
        return iter(_families().values())

    def collect(self) -> Iterator[_Family]:
        """Return all families, as of now."""
        families = _families()
        for manager in self._managers:
            machine = str(manager.machine)
            try:
                stats = manager.stats()
            except (ClosedError, InvariantError):
                _put(families["kvtrie_up"], [machine], 0)
                continue
            _put(families["kvtrie_up"], [machine], 1)
            _add(families, stats, machine)
            for cause, count in dict(self._missed.get(manager, {})).items():
                _put(families["kvtrie_missed_tokens_total"], [machine, cause], count)
            for pool in self._pools[manager]:
                if hasattr(pool, "kept_blocks"):
                    _put(families["kvtrie_host_kept_blocks"], [machine], pool.kept_blocks)
                    for reason, count in pool.lost_blocks.items():
                        family = families["kvtrie_host_lost_blocks_total"]
                        _put(family, [machine, reason], count)
                if hasattr(pool, "breaker"):
                    _add_remote(families, pool.stats(), machine)
        return iter(families.values())


def _families() -> dict[str, _Family]:
    made = {
        "counter": CounterMetricFamily,
        "gauge": GaugeMetricFamily,
        "histogram": HistogramMetricFamily,
    }
    return {
        metric.name: made[metric.type](metric.name, metric.meaning, labels=metric.labels)
        for metric in (*METRICS, *KEPT_METRICS, *MISSED_METRICS, *REMOTE_METRICS)
    }


def _add(families: dict[str, _Family], stats: Stats, machine: str) -> None:
    tiers, lanes = list(stats.tiers.values()), stats.lanes.items()
    for metric in METRICS:
        family = families[metric.name]
        if metric.labels == _BY_MANAGER:
            if metric.of:
                _put(family, [machine], getattr(stats, metric.of) / metric.scale)
        elif metric.labels == _BY_LANE:
            for name, lane in lanes:
                _put(family, [machine, name], getattr(lane, metric.of) / metric.scale)
        else:
            for tier in tiers:
                _add_tier(metric, family, tier, [machine, tier.kind, tier.policy])


def _add_remote(families: dict[str, _Family], stats: Any, machine: str) -> None:  # noqa: ANN401
    """Add the counters of a `RemoteStorage`, a class not imported by this module."""
    for metric in REMOTE_METRICS:
        value: Any = getattr(stats, metric.of)
        if metric.of in {"breaker", "writes"}:
            value = int(value != "closed")
        rows: dict[Any, float] = value if len(metric.labels) > 1 else {(): value}
        for labels, count in rows.items():
            extra = [labels] if isinstance(labels, str) else labels
            _put(families[metric.name], [machine, *extra], count)


def _add_tier(metric: Metric, family: _Family, tier: TierStats, labels: list[str]) -> None:
    if isinstance(family, HistogramMetricFamily):
        for extra, times in _histograms(metric, tier).items():
            bounds = _AGES if metric.of else _LATENCIES
            family.add_metric([*labels, *extra], _buckets(times, bounds), times.sum / metric.scale)
        return
    for extra, value in _numbers(metric, tier).items():
        _put(family, [*labels, *extra], value / metric.scale)


def _put(family: _Family, labels: list[str], value: float) -> None:
    if not isinstance(family, HistogramMetricFamily):
        family.add_metric(labels, value)


def _histograms(metric: Metric, tier: TierStats) -> dict[tuple[str, ...], Histogram]:
    if metric.of:
        return {(): getattr(tier, metric.of)}
    return {("load",): tier.load_time, ("store",): tier.store_time, ("copy",): tier.copy_time}


def _numbers(metric: Metric, tier: TierStats) -> dict[tuple[str, ...], int]:
    if metric.labels[-1] == "group":
        return {(str(at),): getattr(group, metric.of) for at, group in enumerate(tier.groups)}
    if metric.name == "kvtrie_evictions_total":
        return {(cause,): count for cause, count in tier.evictions.items()}
    if metric.name == "kvtrie_eviction_outcomes_total":
        return {
            ("clean",): tier.evicted_clean,
            ("demoted",): tier.evicted_dirty,
            ("dropped",): tier.dropped,
        }
    return {(): getattr(tier, metric.of)}


def _buckets(times: Histogram, bounds: tuple[int, ...]) -> list[tuple[str, float]]:
    edges = [str(bound / _NS) for bound in bounds]
    return [*zip(edges, times.up_to(bounds), strict=True), ("+Inf", times.count)]
