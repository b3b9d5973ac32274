"""Goals of the default policy, and what came of each.

Invariant: a goal whose rows were not played is left out. Cost: none.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import TYPE_CHECKING

from benches.policies.cells import ENDS, HITS, LEAVES
from benches.policies.traces import AGENTS, COMMON

if TYPE_CHECKING:
    from collections.abc import Iterable

    from benches.policies.cells import Row

Key = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Goal:
    """One goal: the figure wanted at least, the one that was reached, and where."""

    what: str
    wanted: float
    reached: float
    where: str = ""

    @property
    def ok(self) -> bool:
        """Whether it is reached."""
        return self.reached >= self.wanted


class Figures:
    """Figures of one mode by policy, trace and room: the mean over seeds."""

    def __init__(self, rows: Iterable[Row], structure: str, tiers: int) -> None:
        self._all: dict[str, dict[Key, list[tuple[float, float]]]] = {}
        for row in rows:
            if (row.structure, row.tiers) == (structure, tiers) and row.cost_saved is not None:
                cells = self._all.setdefault(row.policy, {})
                figures = (row.cost_saved, row.hits)
                cells.setdefault((row.trace, row.room), []).append(figures)

    def policies(self) -> list[str]:
        """All that have a row."""
        return list(self._all)

    def keys(self, policy: str) -> list[Key]:
        """Traces and rooms of a policy."""
        return list(self._all.get(policy, {}))

    def cell(self, policy: str, key: Key) -> tuple[float, float]:
        """Cost saved and hits of a cell."""
        costs, hits = zip(*self._all[policy][key], strict=True)
        return fmean(costs), fmean(hits)

    def spread(self, policy: str, key: Key) -> float:
        """Standard deviation of the cost saved over the seeds."""
        return pstdev(cost for cost, _ in self._all[policy][key])

    def trace(self, policy: str, name: str) -> tuple[float, float]:
        """Means over the rooms of a trace."""
        cells = [self.cell(policy, key) for key in self.keys(policy) if key[0] == name]
        return fmean(cost for cost, _ in cells), fmean(hits for _, hits in cells)

    def mean(self, policy: str) -> tuple[float, float]:
        """Means over traces of equal weight."""
        names = dict.fromkeys(key[0] for key in self.keys(policy))
        means = [self.trace(policy, name) for name in names]
        return fmean(cost for cost, _ in means), fmean(hits for _, hits in means)


def goals_of(rows: list[Row]) -> list[Goal]:
    """All goals whose rows are there."""
    found: list[Goal] = []
    for structure in ("leaf-only", "holes"):
        for tiers in (1, 2):
            figures = Figures(rows, structure, tiers)
            if not {"learned", "lru"} <= set(figures.policies()):
                continue
            if (structure, tiers) == ("leaf-only", 1):
                found += _main(figures)
            else:
                gap = figures.mean("learned")[0] - figures.mean("lru")[0]
                found.append(Goal(f"{structure}, tiers {tiers}: mean - lru", 0, gap))
    return found


def _main(figures: Figures) -> list[Goal]:
    known = set(figures.policies())
    found: list[Goal] = []

    def least(what: str, wanted: float, policy: str, others: tuple[str, ...], part: int) -> None:
        if not {policy, *others} <= known:
            return
        gaps = {
            key: figures.cell(policy, key)[part]
            - max(figures.cell(other, key)[part] for other in others)
            for key in figures.keys(policy)
            if all(key in figures.keys(other) for other in others)
        }
        worst = min(gaps, key=gaps.__getitem__)
        found.append(Goal(what, wanted, gaps[worst], f"{worst[0]}, {worst[1]} blocks"))

    least("worst row - max(lru, flat)", -1.0, "learned", ("lru", "flat"), 0)
    least("worst row - lru", -0.6, "learned", ("lru",), 0)
    for other, wanted in (("lru", 3.0), ("retention", 2.5)):
        if other in known:
            gap = figures.mean("learned")[0] - figures.mean(other)[0]
            found.append(Goal(f"mean - {other}", wanted, gap))
    gap = figures.cell("learned", (COMMON, 30_000))[0] - figures.cell("lru", (COMMON, 30_000))[0]
    found.append(Goal("common, 30 000 - lru", 8.0, gap))
    hits = "learned" + HITS
    if hits in known:
        found.append(Goal("hits: mean - lru", 2.5, figures.mean(hits)[1] - figures.mean("lru")[1]))
        least("hits: worst row - lru", -1.5, hits, ("lru",), 1)
    told, large, agents = "learned" + ENDS, (COMMON, 100_000), (AGENTS, 14_000)
    if {told, LEAVES} <= known:
        gap = figures.cell(told, large)[0] - figures.cell(LEAVES, large)[0]
        found.append(Goal("ends told, common, 100 000 - leaf-Belady", -0.5, gap))
        if agents in figures.keys(told):
            lru, best = figures.cell("lru", agents)[0], figures.cell(LEAVES, agents)[0]
            share = (figures.cell(told, agents)[0] - lru) / (best - lru)
            found.append(Goal("ends told, agents, 14 000: share of lru to Belady", 0.5, share))
    return found
