"""Metrics of the connector: names, help texts and values.

The manager's metrics in `kvtrie.metrics` have the prefix `vllm:kvtrie_` here. The connector adds a
few and logs the increase once a minute, and `vllm_metrics` passes all of them to vLLM.
Invariant: counters are exported as the increase since the last export, gauges as they are.
Cost: 100 microseconds per export, once a second or when a server falls idle.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from kvtrie.engines.server.miss_report import CAUSES
from kvtrie.metrics import METRICS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtrie import Stats
    from kvtrie.engines.server.format_figure import FormatFigure
    from kvtrie.engines.server.why import MissCounter

__all__ = ["OWN", "ConnectorCounters", "Count", "ExportedValues", "MetricsExporter", "exported"]

_LOG = logging.getLogger("vllm.kvtrie")  # below vLLM's logger, for its handlers
_MINUTE_NS = 60_000_000_000

ExportedValues = dict[str, dict[str, dict[str, float]]]
"""Numbers by "counters" or "gauges", by name, by the values of labels with commas between them."""

_PREFIX = "vllm:kvtrie_"


class Count(NamedTuple):
    """An exported number.

    Attributes:
        name: its name in a scrape, with `_total` for a counter.
        type: counter or gauge.
        meaning: the help text.
        labels: the names of its labels in addition to vLLM's.
    """

    name: str
    type: str
    meaning: str
    labels: tuple[str, ...] = ()


OWN = (
    Count(
        f"{_PREFIX}wanted_tokens_total", "counter",
        "Prompt tokens of admitted requests that vLLM did not have itself",
    ),
    Count(
        f"{_PREFIX}found_tokens_total", "counter",
        "Prompt tokens that were found below the GPU, by the tier they came from", ("tier",),
    ),
    Count(
        f"{_PREFIX}computed_blocks_total", "counter",
        "Full blocks that finished steps have written and that kvtrie took note of",
    ),
    Count(
        f"{_PREFIX}lost_total", "counter",
        "What was not stored, not waited for or not loaded, by the reason", ("reason",),
    ),
    Count(
        f"{_PREFIX}missed_tokens_total", "counter",
        "Prompt tokens of admitted requests that are computed, by the cause", ("cause",),
    ),
    Count(
        f"{_PREFIX}dropped_comparisons_total", "counter",
        "Requests that were not compared with cached branches because the queue was full",
    ),
    Count(
        f"{_PREFIX}first_salt_requests_total", "counter",
        "Requests that were the first with their cache_salt",
    ),
    Count(
        f"{_PREFIX}loaded_blocks_total", "counter",
        "Blocks and states of a group of layers that requests had loaded into vLLM's memory",
        ("group",),
    ),
    Count(f"{_PREFIX}held_blocks", "gauge", "Blocks on host that waiting requests hold"),
    Count(f"{_PREFIX}waiting_requests", "gauge", "Requests that wait for a disk or a store"),
    Count(
        f"{_PREFIX}host_kept_blocks", "gauge",
        "Blocks of host memory that the next server would find, of the rank with the fewest",
    ),
    Count(
        f"{_PREFIX}format_kl_nats", "gauge",
        "Mean KL of next tokens that the calibration of the tiers' format has measured",
        ("format",),
    ),
)  # fmt: skip
"""Metrics of the connector itself."""

_MANAGERS = tuple(
    metric
    for metric in METRICS
    if metric.type != "histogram"
    and metric.of
    and metric.labels[-1] in ("machine", "policy", "group")
)


def exported() -> tuple[Count, ...]:
    """Return all metrics exported by a server with the connector."""
    return OWN + tuple(
        Count(
            _PREFIX + metric.name.removeprefix("kvtrie_"),
            metric.type,
            metric.meaning,
            tuple(label for label in metric.labels if label in ("tier", "group")),
        )
        for metric in _MANAGERS
    )


class ConnectorCounters:
    """Counters of a server.

    Attributes:
        tokens: prompt tokens by source of their KV: "host", "disk", "remote", and "asked" for
            all tokens after vLLM's own hit.
        blocks: full blocks: "written".
        lost: failed stores, waits and loads by reason, in requests or blocks.
        loaded: blocks and states loaded for requests, by vLLM's number of their group.
    """

    def __init__(self) -> None:
        self.tokens: Counter[str] = Counter()
        self.blocks: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()
        self.loaded: Counter[int] = Counter()
        self._logged: tuple[int, dict[str, int]] = (0, {})

    def as_dict(self) -> dict[str, int]:
        """Return all counters by name."""
        named = (("tokens", self.tokens), ("blocks", self.blocks), ("lost", self.lost))
        return {f"{name} {key}": one for name, each in named for key, one in sorted(each.items())}

    def line(self, now: int, more: Callable[[], str] | None = None) -> None:
        """Log the increases since the last line, at most once a minute and only if there are any.

        Args:
            now: the time, in nanoseconds.
            more: returns a further part of the line, or "".
        """
        at, before = self._logged
        if now - at < _MINUTE_NS:
            return
        counts = self.as_dict()
        new = {name: one - before.get(name, 0) for name, one in counts.items()}
        if at and any(new.values()):
            parts = [f"{name} {count}" for name, count in new.items() if count]
            if more is not None and (last := more()):
                parts.append(last)
            _LOG.info("kvtrie: %s", ", ".join(parts))
        self._logged = now, counts


class MetricsExporter:
    """Converts cumulative counters to increases since the last export.

    Args:
        groups: vLLM's numbers of the groups of layers, in the manager's order.
    """

    def __init__(self, groups: Sequence[int] = (0,)) -> None:
        self._groups = groups
        self._before: dict[tuple[str, str], float] = {}

    def take(
        self,
        stats: Stats,
        own: ConnectorCounters,
        pinned: int,
        waiting: int,
        why: MissCounter | None = None,
        *,
        kept: int = 0,
        figures: Sequence[FormatFigure] = (),
    ) -> ExportedValues:
        """Return all gauges, and the increases of counters since the last call.

        Args:
            stats: the manager's statistics.
            own: the connector's counters.
            pinned: blocks in host memory pinned by waiting requests.
            waiting: requests waiting for a disk or a shared store.
            why: the causes of computed tokens, or None if they are not counted.
            kept: blocks in host memory for the next server.
            figures: formats of the tiers and their costs.
        """
        counters: dict[str, dict[str, float]] = {}
        gauges: dict[str, dict[str, float]] = {}
        values = self._all(stats, own, pinned, waiting, kept)
        values += [
            (f"{_PREFIX}format_kl_nats", figure.format, figure.kl_mean)
            for figure in figures
            if figure.kl_mean is not None
        ]
        for name, label, value in values if why is None else [*values, *_missed(why)]:
            if not name.endswith("_total"):
                gauges.setdefault(name, {})[label] = value
            elif value != self._before.get((name, label)):  # the first time even if it is 0
                counters.setdefault(name, {})[label] = value - self._before.get((name, label), 0)
                self._before[name, label] = value
        return {"counters": counters, "gauges": gauges}

    def _all(
        self, stats: Stats, own: ConnectorCounters, pinned: int, waiting: int, kept: int
    ) -> list[tuple[str, str, float]]:
        values: list[tuple[str, str, float]] = [
            (f"{_PREFIX}wanted_tokens_total", "", own.tokens["asked"]),
            (f"{_PREFIX}computed_blocks_total", "", own.blocks["written"]),
            (f"{_PREFIX}held_blocks", "", pinned),
            (f"{_PREFIX}waiting_requests", "", waiting),
            (f"{_PREFIX}host_kept_blocks", "", kept),
        ]
        values += [
            (f"{_PREFIX}found_tokens_total", tier, own.tokens[tier])
            for tier in ("host", "disk", "remote")
            if tier != "remote" or tier in stats.tiers
        ]
        values += [(f"{_PREFIX}lost_total", why, count) for why, count in own.lost.items()]
        name = f"{_PREFIX}loaded_blocks_total"
        values += [(name, f"{group}", own.loaded[group]) for group in self._groups]
        for metric in _MANAGERS:
            name = _PREFIX + metric.name.removeprefix("kvtrie_")
            if "group" in metric.labels:
                values += [
                    (name, f"{kind},{group}", getattr(slots, metric.of))
                    for kind, tier in stats.tiers.items()
                    for group, slots in zip(self._groups, tier.groups, strict=False)
                ]
            elif "tier" in metric.labels:
                values += [
                    (name, kind, getattr(tier, metric.of) / metric.scale)
                    for kind, tier in stats.tiers.items()
                ]
            else:
                values.append((name, "", getattr(stats, metric.of) / metric.scale))
        return values


def _missed(why: MissCounter) -> list[tuple[str, str, float]]:
    name = f"{_PREFIX}missed_tokens_total"
    return [
        *((name, cause, float(why.tokens[cause])) for cause in CAUSES),
        (f"{_PREFIX}dropped_comparisons_total", "", why.dropped),
        (f"{_PREFIX}first_salt_requests_total", "", why.first_salts),
    ]
