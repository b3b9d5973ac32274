"""Summary: rows of figures out of records, each with its confidence interval.

*Recovered* is 1 - KL / KL of plain reuse, both summed over the cases of a kind: a case in which
plain reuse is right already says little, and would say most in a mean of quotients. Intervals are
the middle 95 % of 2000 resamples of the cases (Efron's percentile bootstrap), kinds apart.
Invariant: a row's setting is chosen on even seeds, its figures are those of odd ones. Cost: a tenth
of a second.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benches.eval_fusion.settings import Record, Row, Setting
    from benches.evaluation import Key

RESAMPLES = 2000
MEAN = "mean"
FEWEST = 3
"""Cases of which a rank correlation says anything."""


class Interval(NamedTuple):
    """A figure and the ends of its 95 % interval."""

    value: float
    low: float
    high: float


class Line(NamedTuple):
    """A row's figures on odd seeds.

    Attributes:
        row: it.
        setting: the one that was chosen.
        cases: how many.
        recovered: by kind, and "mean" of the kinds.
        kl: mean of the kinds, in nats.
        exact: share of cases in which every best token of the answer is the full prefill's.
        same: share of the answers' tokens of which that is so.
        cost: CPU time of the fusion, of that of the full prefill.
        computed: share of the chunks' (token, layer) pairs.
        rank: Spearman's correlation of the monitor's score with -KL; None without a score.
    """

    row: Row
    setting: Setting
    cases: int
    recovered: dict[str, Interval]
    kl: float
    exact: float
    same: float
    cost: float
    computed: float
    rank: float | None

    def missed(self) -> dict[str, bool]:
        """By kind that has a goal, whether the interval's lower end is below it."""
        return {
            kind: not (kind in self.recovered and self.recovered[kind].low >= goal)
            for kind, goal in self.row.goals.items()
        }

    def as_dict(self) -> dict[str, Any]:
        """All of it, as JSON takes it."""
        return self._asdict() | {
            "row": self.row.name,
            "setting": str(self.setting),
            "recovered": {kind: each._asdict() for kind, each in self.recovered.items()},
            "goals": self.row.goals,
            "missed": [kind for kind, missed in self.missed().items() if missed],
        }


class Pair(NamedTuple):
    """A case fused in a setting, and reused plainly."""

    mine: Record
    reuse: Record


def choose(row: Row, records: Mapping[Key, Record], reuse: Setting) -> Setting:
    """The setting that recovers most on even seeds, as the mean of kinds; else the first."""
    best = {
        setting: np.mean([_recovered(each) for each in found.values()])
        for setting in row.settings
        if (found := _pairs(setting, records, reuse, odd=False))
    }
    return max(best, key=best.__getitem__) if len(row.settings) > 1 and best else row.settings[0]


def line_of(
    row: Row, setting: Setting, records: Mapping[Key, Record], reuse: Setting
) -> Line | None:
    """The figures of a setting on odd seeds; None if it was measured on none of them."""
    kinds = _pairs(setting, records, reuse, odd=True)
    if not kinds:
        return None
    every = [pair.mine for found in kinds.values() for pair in found]
    draw = np.random.default_rng(0)
    resampled = {kind: _resampled(found, draw) for kind, found in kinds.items()}
    recovered = {kind: _figure(_recovered(found), resampled[kind]) for kind, found in kinds.items()}
    mean = float(np.mean([each.value for each in recovered.values()]))
    scored = [each for each in every if each.score is not None]
    return Line(
        row,
        setting,
        len(every),
        {MEAN: _figure(mean, np.mean(list(resampled.values()), axis=0)), **recovered},
        kl=float(np.mean([np.mean([pair.mine.kl for pair in each]) for each in kinds.values()])),
        exact=float(np.mean([each.same == 1 for each in every])),
        same=float(np.mean([each.same for each in every])),
        cost=sum(each.seconds for each in every) / sum(each.full for each in every),
        computed=float(np.mean([each.computed for each in every])),
        rank=correlation([each.score or 0.0 for each in scored], [-each.kl for each in scored]),
    )


def correlation(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Spearman's rank correlation; None of fewer than three cases or of one value alone."""
    if len(one) < FEWEST or len(set(one)) == 1 or len(set(other)) == 1:
        return None
    return float(np.corrcoef(_ranks(one), _ranks(other))[0, 1])


def _pairs(
    setting: Setting, records: Mapping[Key, Record], reuse: Setting, *, odd: bool
) -> dict[str, list[Pair]]:
    found: dict[str, list[Pair]] = {}
    for (kind, seed, name), record in sorted(records.items()):
        plain = records.get((kind, seed, str(reuse)))
        if name == str(setting) and seed % 2 == odd and plain is not None:
            found.setdefault(kind, []).append(Pair(record, plain))
    return found


def _recovered(pairs: Sequence[Pair]) -> float:
    whole = sum(pair.reuse.kl for pair in pairs)
    return 1 - sum(pair.mine.kl for pair in pairs) / whole if whole else 0.0


def _resampled(pairs: Sequence[Pair], draw: np.random.Generator) -> np.ndarray:
    mine, reuse = (np.array([each.kl for each in side]) for side in zip(*pairs, strict=True))
    drawn = draw.integers(len(pairs), size=(RESAMPLES, len(pairs)))
    whole = reuse[drawn].sum(axis=1)
    return 1 - mine[drawn].sum(axis=1) / np.where(whole > 0, whole, np.inf)


def _figure(value: float, resampled: np.ndarray) -> Interval:
    low, high = np.percentile(resampled, [2.5, 97.5])
    return Interval(value, float(low), float(high))


def _ranks(numbers: Sequence[float]) -> np.ndarray:
    """Ranks from 0; equal numbers share the mean of theirs."""
    _, group, sizes = np.unique(numbers, return_inverse=True, return_counts=True)
    return (np.cumsum(sizes) - (sizes + 1) / 2)[group]
