"""How much of a full prefill fusion recovers on a real model, selection by selection.

    make eval-fusion
    make eval-fusion ARGS="--even 8 --odd 8"
    make eval-fusion ARGS="--quick"

SmolLM2-135M in float32 answers questions over chunks whose KV was computed alone: by a full
prefill, by plain reuse, and fused in each setting of `benches/eval_fusion/settings.py`. Even seeds
choose the layers of each selection, odd ones are reported.
Cost: twenty seconds a case on a free core, forty minutes for the 128 of the defaults; `--quick`, a
random model, half a minute.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import transformers
from rich.console import Console

from benches.eval_fusion.cases import FEWEST, KINDS, Sizes, case_of
from benches.eval_fusion.settings import Record, rows_of
from benches.eval_fusion.summary import MEAN, choose, line_of
from benches.eval_fusion.trial import Trial
from benches.evaluation import Cell, Evaluation, evaluate, table_of
from kvtrie.demo.model import smollm, tiny

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence

    from benches.eval_fusion.settings import Setting
    from benches.eval_fusion.summary import Interval, Line
    from benches.evaluation import Key

LEGEND = """\
mean of kinds and each kind: recovered, 1 - KL / KL of plain reuse, with 95 % intervals
exact, tokens: answers, and their tokens, whose best token is the full prefill's
cost, computed: CPU time, of the full prefill's; share of all chunks' tokens and layers
rank: correlation of the monitor's score with -KL"""
SEEDS, QUICK = 16, 2


class FusionEvaluation(Evaluation[Record]):
    """All settings on even seeds, then the chosen ones on odd seeds."""

    name = "eval-fusion"
    record_name = "eval_fusion.json"
    record = Record

    def __init__(self, given: argparse.Namespace) -> None:
        super().__init__(given)
        seeds = QUICK if given.quick else SEEDS
        self._even = range(0, 2 * (seeds if given.even is None else given.even), 2)
        self._odd = range(1, 2 * (seeds if given.odd is None else given.odd), 2)
        self._sizes = Sizes(given.chunks, given.chunk_tokens, given.answer_tokens)
        self._speaker = tiny() if given.quick else smollm(Console(stderr=True))
        self._trial = Trial(self._speaker, self._sizes)
        self.world = self._trial.world
        self.rows = rows_of(self._trial.layers)
        self._reuse = self.rows[0].settings[0]

    @staticmethod
    def options(parser: argparse.ArgumentParser) -> None:
        """Add seeds and sizes."""
        number = {"type": int, "metavar": "N"}
        parser.add_argument("--even", **number, help=f"even seeds of each kind (default: {SEEDS})")
        parser.add_argument("--odd", **number, help=f"odd seeds of each kind (default: {SEEDS})")
        parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="of cases")
        parser.add_argument("--chunks", **number, default=5, help="of a context")
        parser.add_argument("--chunk-tokens", **number, default=128, help="of each chunk")
        parser.add_argument("--answer-tokens", **number, default=63, help="of running text")
        least = {"even": 0, "odd": 1, "chunks": FEWEST, "chunk_tokens": 32, "answer_tokens": 1}
        parser.set_defaults(least=least)

    def close(self) -> None:
        """Give the memory back."""
        self._trial.close()

    def stages(self) -> Iterator[tuple[str, Sequence[Cell]]]:
        """Even seeds with all settings, odd ones with those that even seeds chose."""
        every = [setting for row in self.rows for setting in row.settings]
        yield "even seeds", self._cells(self._even, every)
        yield "odd seeds", self._cells(self._odd, self.chosen())

    def chosen(self) -> list[Setting]:
        """Per row the setting that is reported."""
        return [choose(row, self.by_key, self._reuse) for row in self.rows]

    def lines(self) -> list[Line]:
        """The rows that were measured on odd seeds."""
        both = zip(self.rows, self.chosen(), strict=True)
        lines = (line_of(row, setting, self.by_key, self._reuse) for row, setting in both)
        return [line for line in lines if line is not None]

    def document(self, about: dict[str, Any]) -> dict[str, Any]:
        """Return `{about, rows}`."""
        even, odd = self._cases()
        about |= {
            "world": self.world,
            "transformers": transformers.__version__,
            "threads": self.given.threads,
            "cases": {"even": even, "odd": odd},
        }
        return {"about": about, "rows": [line.as_dict() for line in self.lines()]}

    def show(self, console: Console) -> None:
        """Print a row per selection, the legend, and the goals of lower ends of intervals."""
        lines = self.lines()

        def recovered(kind: str) -> Callable[[Line], str]:
            return lambda line: _words(line.recovered.get(kind))

        columns: dict[str, Callable[[Line], str]] = {
            "selection": lambda line: line.row.name,
            "ratio": lambda line: _short(line.row.ratio),
            "layers": lambda line: line.setting.layers,
            **{kind: recovered(kind) for kind in (MEAN, *self.given.kinds)},
            "KL": lambda line: f"{line.kl:.4f}",
            "exact": lambda line: _short(line.exact),
            "tokens": lambda line: _short(line.same),
            "cost": lambda line: _short(line.cost),
            "computed": lambda line: _short(line.computed),
            "rank": lambda line: "" if line.rank is None else _short(line.rank),
        }
        console.print(table_of(self._title(), columns, lines))
        console.print(LEGEND)
        for line in lines:
            words = [
                f"{kind} ≥ {_short(line.row.goals[kind])} {'missed' if missed else 'reached'}"
                for kind, missed in line.missed().items()
            ]
            if words:
                name = f"{line.row.name} {_short(line.row.ratio)}"
                console.print(f"goals of {name}: {', '.join(words)}")

    def _cells(self, seeds: Sequence[int], settings: Sequence[Setting]) -> list[Cell]:
        by_name = {str(setting): setting for setting in settings}

        def measure(kind: str, seed: int, keys: list[Key]) -> Iterator[Record]:
            case = case_of(self._speaker, kind, seed, self._sizes)
            return self._trial.measure(case, [by_name[name] for *_, name in keys])

        return [
            Cell([(kind, seed, name) for name in by_name], partial(measure, kind, seed))
            for seed in seeds
            for kind in self.given.kinds
        ]

    def _cases(self) -> list[int]:
        cases = {(kind, seed) for kind, seed, _ in self.by_key}
        return [sum(seed % 2 == odd for _, seed in cases) for odd in (0, 1)]

    def _title(self) -> str:
        even, odd = self._cases()
        return f"{self.world}: {odd} cases of odd seeds, settings chosen on {even} of even ones"


def _words(figure: Interval | None) -> str:
    if figure is None:
        return ""
    return f"{_short(figure.value)} [{_short(figure.low)}, {_short(figure.high)}]"


def _short(number: float) -> str:
    """Two digits after the point, and no zero before it."""
    return f"{number:.2f}".replace("0.", ".", 1) if abs(number) < 1 else f"{number:.2f}"


def main() -> int:
    """Measure what is missing, then print all of it."""
    return evaluate(FusionEvaluation)


if __name__ == "__main__":
    sys.exit(main())
