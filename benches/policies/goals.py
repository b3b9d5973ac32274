"""Goals of the default policy, and what came of each.

Invariant: a goal whose rows were not played is left out. Cost: none.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import TYPE_CHECKING

from benches.policies.cells import BALANCED, ENDS, ENGINE, HITS, LEAVES, SHORT
from benches.policies.short import PEERS
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
    return found + _engine(Figures(rows, ENGINE, 2)) + _short(rows)


def short_figures(rows: Iterable[Row]) -> dict[Key, dict[str, float]]:
    """Hits on streams of single blocks, by stream and room, then by policy: means over seeds."""
    cells: dict[Key, dict[str, list[float]]] = {}
    for row in rows:
        if row.structure == SHORT:
            policies = cells.setdefault((row.trace, row.room), {})
            policies.setdefault(row.policy, []).append(row.hits)
    return {key: {name: fmean(hits) for name, hits in cells[key].items()} for key in cells}


def _short(rows: list[Row]) -> list[Goal]:
    """Hits of the default policy per those of the best peer, where it is worst."""
    shares = {
        key: hits["learned"] / max(hits[peer] for peer in PEERS)
        for key, hits in short_figures(rows).items()
        if {"learned", *PEERS} <= set(hits)
    }
    if not shares:
        return []
    worst = min(shares, key=shares.__getitem__)
    where = f"{worst[0]}, {worst[1]} blocks"
    return [Goal("short: worst row, share of the best peer", 0.9, shares[worst], where)]


def _engine(figures: Figures) -> list[Goal]:
    """Goals below an engine that evicts by lru, of each objective."""
    found: list[Goal] = []
    for policy in ("learned", "learned" + BALANCED):
        if not {policy, "lru"} <= set(figures.policies()):
            continue
        gaps = {
            key: figures.cell(policy, key)[0] - figures.cell("lru", key)[0]
            for key in figures.keys(policy)
        }
        worst = min(gaps, key=gaps.__getitem__)
        where = f"{worst[0]}, {worst[1]} blocks"
        found.append(Goal(f"engine, {policy}: worst row - lru", -0.3, gaps[worst], where))
        means = zip(figures.mean(policy), figures.mean("lru"), strict=True)
        cost, hits = (mine - theirs for mine, theirs in means)
        found.append(Goal(f"engine, {policy}: mean cost - lru", 3.0, cost))
        found.append(Goal(f"engine, {policy}: mean hits - lru", 1.5, hits))
    return found


def _main(figures: Figures) -> list[Goal]:
    measured = set(figures.policies())
    found: list[Goal] = []

    def least(what: str, wanted: float, policy: str, others: tuple[str, ...], part: int) -> None:
        if not {policy, *others} <= measured:
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
        if other in measured:
            gap = figures.mean("learned")[0] - figures.mean(other)[0]
            found.append(Goal(f"mean - {other}", wanted, gap))
    gap = figures.cell("learned", (COMMON, 30_000))[0] - figures.cell("lru", (COMMON, 30_000))[0]
    found.append(Goal("common, 30 000 - lru", 8.0, gap))
    hits = "learned" + HITS
    if hits in measured:
        found.append(Goal("hits: mean - lru", 2.5, figures.mean(hits)[1] - figures.mean("lru")[1]))
        least("hits: worst row - lru", -1.5, hits, ("lru",), 1)
    with_ends, large, agents = "learned" + ENDS, (COMMON, 100_000), (AGENTS, 14_000)
    if {with_ends, LEAVES} <= measured:
        gap = figures.cell(with_ends, large)[0] - figures.cell(LEAVES, large)[0]
        found.append(Goal("ends told, common, 100 000 - leaf-Belady", -0.5, gap))
        if agents in figures.keys(with_ends):
            lru, best = figures.cell("lru", agents)[0], figures.cell(LEAVES, agents)[0]
            share = (figures.cell(with_ends, agents)[0] - lru) / (best - lru)
            found.append(Goal("ends told, agents, 14 000: share of lru to Belady", 0.5, share))
    return found
