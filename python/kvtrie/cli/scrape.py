"""A scrape: the counters of managers at a moment, in Prometheus' form.

Invariant: a manager in this process and a manager at an address give the same scrape. Cost: a pass
over the samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client.metrics_core import Metric

__all__ = ["Scrape", "quantile"]


@dataclass(frozen=True, slots=True)
class Scrape:
    """Samples of a moment.

    Attributes:
        samples: per name, all samples with their labels.
    """

    samples: dict[str, list[tuple[dict[str, str], float]]]

    @classmethod
    def of(cls, families: Iterable[Metric]) -> Scrape:
        """Return the samples with names that begin with `kvtrie_`."""
        samples: dict[str, list[tuple[dict[str, str], float]]] = {}
        for family in families:
            for sample in family.samples:
                if sample.name.startswith("kvtrie_"):
                    samples.setdefault(sample.name, []).append((sample.labels, sample.value))
        return cls(samples)

    def value(self, name: str, labels: dict[str, str]) -> float:
        """Return the sum of all samples with these labels."""
        return sum(
            value for has, value in self.samples.get(name, ()) if labels.items() <= has.items()
        )

    def buckets(self, name: str, labels: dict[str, str]) -> dict[float, float]:
        """Return the counts of a histogram's times up to each bound, in seconds."""
        found = self.samples.get(f"{name}_bucket", ())
        return {float(has["le"]): value for has, value in found if labels.items() <= has.items()}

    def tiers(self) -> list[dict[str, str]]:
        """Return the labels of every tier, machine by machine."""
        return [has for has, _ in self.samples.get("kvtrie_slots", ())]


def quantile(share: float, now: dict[float, float], before: dict[float, float]) -> float | None:
    """Return the time not exceeded by a share of the times since `before`, in seconds.

    Times between two bounds are assumed to be spread evenly, as in Prometheus. None without times.
    """
    counts = [(bound, now[bound] - before.get(bound, 0.0)) for bound in sorted(now)]
    if not counts or counts[-1][1] <= 0:
        return None
    wanted = share * counts[-1][1]
    low = below = 0.0
    for bound, count in counts:
        if count >= wanted and count > below:
            part = (wanted - below) / (count - below)
            return low if bound == float("inf") else low + (bound - low) * part
        low, below = bound, count
    return low
