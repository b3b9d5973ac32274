"""Goals of the default policy, and what came of each.

Invariant: a goal whose rows were not played is left out. Cost: none.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from benches.policies.cells import BALANCED, ENDS, ENGINE, HITS, LEAVES, SHORT
from benches.policies.short import PEERS
from benches.policies.traces import AGENTS, COMMON

if TYPE_CHECKING:
    from collections.abc import Iterable

    from benches.policies.cells import Row
    from benches.policies.equal import Share
    from benches.policies.waits import Wait

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
        self._all: dict[str, dict[Key, dict[int, tuple[float, float]]]] = {}
        for row in rows:
            if (row.structure, row.tiers) == (structure, tiers) and row.cost_saved is not None:
                cells = self._all.setdefault(row.policy, {})
                figures = (row.cost_saved, row.hits)
                cells.setdefault((row.trace, row.room), {})[row.seed] = figures

    def policies(self) -> list[str]:
        """All that have a row."""
        return list(self._all)

    def keys(self, policy: str) -> list[Key]:
        """Traces and rooms of a policy."""
        return list(self._all.get(policy, {}))

    def complete(self, policy: str) -> set[Key]:
        """Traces and rooms that a policy has with every seed that any policy has."""
        return {
            key
            for key, seeds in self._all.get(policy, {}).items()
            if all(cells.get(key, {}).keys() <= seeds.keys() for cells in self._all.values())
        }

    def cell(self, policy: str, key: Key) -> tuple[float, float]:
        """Cost saved and hits of a cell."""
        costs, hits = zip(*self._all[policy][key].values(), strict=True)
        return fmean(costs), fmean(hits)

    def trace(self, policy: str, name: str) -> tuple[float, float]:
        """Means over the rooms of a trace."""
        cells = [self.cell(policy, key) for key in self.keys(policy) if key[0] == name]
        return fmean(cost for cost, _ in cells), fmean(hits for _, hits in cells)

    def mean(self, policy: str) -> tuple[float, float]:
        """Means over traces of equal weight."""
        names = dict.fromkeys(key[0] for key in self.keys(policy))
        means = [self.trace(policy, name) for name in names]
        return fmean(cost for cost, _ in means), fmean(hits for _, hits in means)

    def above(self, policy: str, other: str) -> dict[Key, tuple[float, float]]:
        """Cost saved and hits more than another policy's, by trace and room, of the same seeds."""
        found: dict[Key, tuple[float, float]] = {}
        for key, mine in self._all.get(policy, {}).items():
            theirs = self._all.get(other, {}).get(key, {})
            seeds = mine.keys() & theirs.keys()
            if seeds:
                found[key] = (
                    fmean(mine[seed][0] - theirs[seed][0] for seed in seeds),
                    fmean(mine[seed][1] - theirs[seed][1] for seed in seeds),
                )
        return found

    def gain(self, policy: str, other: str) -> tuple[float, float]:
        """The means, over traces of equal weight, of what a policy is above another one."""
        traces: dict[str, list[tuple[float, float]]] = {}
        for (trace, _), gap in self.above(policy, other).items():
            traces.setdefault(trace, []).append(gap)
        means = [(mean_of(gaps, 0), mean_of(gaps, 1)) for gaps in traces.values()]
        return mean_of(means, 0), mean_of(means, 1)


def goals_of(
    rows: list[Row], shares: Iterable[Share] = (), times: Iterable[Wait] = ()
) -> list[Goal]:
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
                gap = figures.gain("learned", "lru")[0]
                found.append(Goal(f"{structure}, tiers {tiers}: mean - lru", 0, gap))
    return found + _engine(Figures(rows, ENGINE, 2)) + _short(rows) + _rooms(shares) + _waits(times)


def _waits(times: Iterable[Wait]) -> list[Goal]:
    """Mean first-token time of the best online policy per the default's, where that is worst."""
    cells: dict[tuple[str, str, int], dict[str, float]] = {}
    for time in times:
        cells.setdefault((time.structure, time.trace, time.load), {})[time.policy] = time.mean
    found: list[Goal] = []
    for structure in dict.fromkeys(name for name, _, _ in cells):
        shares = {
            (trace, load, min(means, key=means.__getitem__)): min(means.values()) / means["learned"]
            for (name, trace, load), means in cells.items()
            if name == structure and "learned" in means
        }
        if shares:
            worst = min(shares, key=shares.__getitem__)
            where = f"{worst[0]}, load {worst[1]} %, `{worst[2]}`"
            what = f"{structure}: best mean / learned, worst trace"
            found.append(Goal(what, 0.99, shares[worst], where))
    return found


def share_means(shares: Iterable[Share], structure: str) -> dict[str, tuple[float, float]]:
    """Shares of the room of lru for its cost and its hits, by trace: means over seeds."""
    found: dict[str, list[tuple[float, float]]] = {}
    for share in shares:
        if share.structure == structure:
            found.setdefault(share.trace, []).append((share.cost, share.hits))
    return {name: (mean_of(each, 0), mean_of(each, 1)) for name, each in found.items()}


def mean_of(pairs: Iterable[tuple[float, float]], at: int) -> float:
    """The mean of the first or of the second figures."""
    return fmean(pair[at] for pair in pairs)


def _rooms(shares: Iterable[Share]) -> list[Goal]:
    """Room that the default policy leaves free, of that in which lru is as good."""
    shares = list(shares)
    found: list[Goal] = []
    for structure in ("leaf-only", ENGINE):
        means = share_means(shares, structure)
        if means:
            cost, hits = (1 - mean_of(means.values(), at) for at in (0, 1))
            found.append(Goal(f"{structure}: room left at lru's cost, share", 0.25, cost))
            found.append(Goal(f"{structure}: room left at lru's hits, share", 0.1, hits))
    return found


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
        gaps = {key: gap[0] for key, gap in figures.above(policy, "lru").items()}
        if not gaps:
            continue
        worst = min(gaps, key=gaps.__getitem__)
        where = f"{worst[0]}, {worst[1]} blocks"
        found.append(Goal(f"engine, {policy}: worst row - lru", -0.3, gaps[worst], where))
        cost, hits = figures.gain(policy, "lru")
        found.append(Goal(f"engine, {policy}: mean cost - lru", 3.0, cost))
        found.append(Goal(f"engine, {policy}: mean hits - lru", 1.5, hits))
    return found


def _main(figures: Figures) -> list[Goal]:
    measured = set(figures.policies())
    found: list[Goal] = []

    def least(what: str, wanted: float, policy: str, others: tuple[str, ...], part: int) -> None:
        if not {policy, *others} <= measured:
            return
        above = [figures.above(policy, other) for other in others]
        gaps = {
            key: min(gap[key][part] for gap in above)
            for key in figures.keys(policy)
            if all(key in gap for gap in above)
        }
        if not gaps:
            return
        worst = min(gaps, key=gaps.__getitem__)
        found.append(Goal(what, wanted, gaps[worst], f"{worst[0]}, {worst[1]} blocks"))

    least("worst row - max(lru, flat)", -1.0, "learned", ("lru", "flat"), 0)
    least("worst row - lru", -0.3, "learned", ("lru",), 0)
    for other, wanted in (("lru", 3.5), ("retention", 2.5)):
        if other in measured:
            gap = figures.gain("learned", other)[0]
            found.append(Goal(f"mean - {other}", wanted, gap))
    gaps = figures.above("learned", "lru")
    if (COMMON, 30_000) in gaps:
        found.append(Goal("common, 30 000 - lru", 8.0, gaps[COMMON, 30_000][0]))
    hits = "learned" + HITS
    if hits in measured:
        found.append(Goal("hits: mean - lru", 2.5, figures.gain(hits, "lru")[1]))
        least("hits: worst row - lru", -1.5, hits, ("lru",), 1)
        names = dict.fromkeys(name for name, _ in figures.above(hits, "lru"))
        means = {
            name: fmean(gap[1] for key, gap in figures.above(hits, "lru").items() if key[0] == name)
            for name in names
        }
        worst = min(means, key=means.__getitem__)
        found.append(Goal("hits: worst trace, mean of rooms - lru", 0.0, means[worst], worst))
    with_ends, large, agents = "learned" + ENDS, (COMMON, 100_000), (AGENTS, 14_000)
    gaps = figures.above(with_ends, LEAVES)
    if large in gaps:
        found.append(Goal("ends hinted, common, 100 000 - leaf-Belady", -0.5, gaps[large][0]))
    if agents in gaps and agents in figures.keys("lru"):
        lru, best = figures.cell("lru", agents)[0], figures.cell(LEAVES, agents)[0]
        share = (figures.cell(with_ends, agents)[0] - lru) / (best - lru)
        found.append(Goal("ends hinted, agents, 14 000: share of lru to Belady", 0.5, share))
    return found
