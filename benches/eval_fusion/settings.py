"""Settings: how a fusion is set up, the record of one, and the rows of the table.

Invariant: a setting's name says all of it, and is the same in every run. Cost: none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

REUSE = "none"
ATTENDED = (0.4, 0.65)
"""First and last layers, as parts of a model's depth, at which the query's attention is read."""

PROBED = 8


class Setting(NamedTuple):
    """Arguments of a `Fusor`; None leaves them to it.

    Attributes:
        select: the way, by name.
        ratio: share of the chunks' tokens to compute again.
        at: layer at which deviations are looked at.
        rank_layers: first and last layer whose attention ranks.
        probe: tokens that a monitor computes to look at.
    """

    select: str
    ratio: float
    at: int | None = None
    rank_layers: tuple[int, int] | None = None
    probe: int = 0

    @property
    def layers(self) -> str:
        """The layers it looks at, for people."""
        words = [] if self.at is None else [f"at {self.at}"]
        if self.rank_layers is not None:
            low, high = self.rank_layers
            words.append(f"heed {low}" if low == high else f"heed {low}-{high}")
        return ", ".join(words)

    def __str__(self) -> str:
        probed = f", probe {self.probe}" if self.probe else ""
        return (
            ", ".join(each for each in (f"{self.select} {self.ratio}", self.layers) if each)
            + probed
        )


@dataclass(frozen=True, slots=True)
class Record:
    """The figures of one fusion of one case.

    Attributes:
        world: the model and the sizes of its cases.
        kind: of the case.
        seed: of the case.
        setting: its name.
        kl: mean over the answer of KL(full prefill || fused), in nats.
        same: share of the answer's tokens whose best token is that of the full prefill.
        seconds: of CPU, of the fusion with its selection.
        full: of CPU, of the full prefill of the same tokens.
        computed: share of the chunks' (token, layer) pairs that was computed.
        score: the monitor's; None where there is none.
    """

    world: str
    kind: str
    seed: int
    setting: str
    kl: float
    same: float
    seconds: float
    full: float
    computed: float
    score: float | None

    @property
    def key(self) -> tuple[str, int, str]:
        """Kind, seed and name of the setting."""
        return self.kind, self.seed, self.setting


class Row(NamedTuple):
    """A row of the table.

    Attributes:
        name: of the selection.
        settings: of which the best on even seeds is reported on odd ones.
        goals: by kind, "mean" for the mean of kinds: the least lower end of the interval.
    """

    name: str
    settings: list[Setting]
    goals: dict[str, float]

    @property
    def ratio(self) -> float:
        """Share of the chunks' tokens to compute again."""
        return self.settings[0].ratio


def rows_of(layers: int) -> list[Row]:
    """The rows for a model of `layers` layers; the first one is plain reuse."""
    low, high = (int(part * layers) for part in ATTENDED)
    looks = sorted({min(at, layers - 1) for at in (1, 2)})
    one, some, every = (low, low), (low, high), (0, layers - 1)

    def single(select: str, ratio: float) -> Row:
        return Row(select, [Setting(select, ratio)], {})

    def deviating(select: str, goals: dict[str, float]) -> Row:
        return Row(select, [Setting(select, 0.15, at=at) for at in looks], goals)

    both = [
        Setting("values+question", 0.30, at=at, rank_layers=layers)
        for at in looks
        for layers in (one, some)
    ]
    question_rows = [Setting("first+question", 0.15, rank_layers=layers) for layers in (one, some)]
    return [
        single(REUSE, 0.0),
        single("random", 0.15),
        single("first", 0.05),
        single("first", 0.15),
        deviating("keys", {}),
        deviating("values", {"mean": 0.39, "split": 0.75, "text": 0.35}),
        Row(
            "question",
            [Setting("question", 0.15, rank_layers=layers) for layers in (one, some, every)],
            {},
        ),
        Row("first+question", question_rows, {"mean": 0.50, "split": 0.84, "text": 0.49}),
        Row("values+question", both, {"mean": 0.65}),
        Row("first+question, monitored", [question_rows[-1]._replace(probe=PROBED)], {}),
    ]
