"""KvtrieStats and KvtrieProm: counts passed by vLLM from its scheduler to its metrics.

Invariant: plain numbers under plain names, readable in any process. Merging loses nothing.
Cost: an addition per number.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvtrie.engines.vllm.metrics import exported

if TYPE_CHECKING:
    from kvtrie.engines.vllm.metrics import ExportedValues

__all__ = ["KvtrieProm", "KvtrieStats"]

_LOGGED = ("vllm:kvtrie_found_tokens_total", "vllm:kvtrie_lost_total")


class KvtrieStats(KVConnectorStats):
    """Metrics since the last export, with `data` from `MetricsExporter.take`."""

    def reset(self) -> None:
        """Forget all counts."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KvtrieStats:
        """Merge later metrics: counters add up, gauges take the later value."""
        merged: ExportedValues = self.data
        later: ExportedValues = other.data
        for name, rows in later.get("counters", {}).items():
            mine = merged.setdefault("counters", {}).setdefault(name, {})
            for label, value in rows.items():
                mine[label] = mine.get(label, 0) + value
        for name, rows in later.get("gauges", {}).items():
            merged.setdefault("gauges", {})[name] = dict(rows)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the numbers of vLLM's log line: tokens found by tier, losses by reason."""
        counters: dict[str, dict[str, float]] = self.data.get("counters", {})
        return {
            f"{name.removeprefix('vllm:kvtrie_').removesuffix('_total')} {label}": value
            for name in _LOGGED
            for label, value in counters.get(name, {}).items()
            if value
        }

    def is_empty(self) -> bool:
        """Return whether nothing was counted."""
        return not any(self.data.values())


class KvtrieProm(KVConnectorPromMetrics):
    """Registers the metrics of `exported`, with vLLM's labels and their own."""

    def __init__(
        self,
        vllm_config: Any,  # noqa: ANN401 - vLLM's own
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        # With several API servers, each has the values of some steps, so only the latest are valid.
        gauge = partial(metric_types[Gauge], multiprocess_mode="mostrecent")
        made = {"counter": metric_types[Counter], "gauge": gauge}
        self._counts = {count.name: count for count in exported()}
        self._metrics = {
            count.name: made[count.type](
                name=count.name,
                documentation=count.meaning,
                labelnames=[*labelnames, *count.labels],
            )
            for count in self._counts.values()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add an engine's counts."""
        exports: ExportedValues = transfer_stats_data
        for kind, rows in exports.items():
            for name, values in rows.items():
                for label, value in values.items():
                    labels = [*self.per_engine_labelvalues[engine_idx]]
                    own = self._counts[name].labels
                    labels += label.split(",", len(own) - 1) if own else []
                    metric = self._metrics[name].labels(*labels)
                    if kind == "counters":
                        metric.inc(value)
                    else:
                        metric.set(value)
