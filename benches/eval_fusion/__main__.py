"""How much of a full prefill fusion recovers on a real model, selection by selection.

    make eval-fusion
    make eval-fusion ARGS="--even 8 --odd 8"
    make eval-fusion ARGS="--quick"

SmolLM2-135M in float32 answers questions over chunks whose KV was computed alone: by a full
prefill, by plain reuse, and fused in each setting of `benches/eval_fusion/settings.py`. Even seeds
choose the layers of each selection, odd ones are reported. Every figure is appended to a file as
soon as it is measured; the same command goes on from there.
Cost: twenty seconds a case on a free core, forty minutes for the 128 of the defaults; `--quick`, a
random model, half a minute.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import transformers
from rich.console import Console

from benches.core.place import place
from benches.eval_fusion.cases import FEWEST, KINDS, Sizes, case_of
from benches.eval_fusion.picture import draw
from benches.eval_fusion.record import append, read
from benches.eval_fusion.report import LEGEND, goals_of, table_of
from benches.eval_fusion.settings import rows_of
from benches.eval_fusion.summary import choose, line_of
from benches.eval_fusion.trial import Trial
from kvtrie.cli.progress import watched
from kvtrie.demo.model import smollm, tiny
from kvtrie.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benches.eval_fusion.record import Key, Record
    from benches.eval_fusion.settings import Row, Setting
    from benches.eval_fusion.summary import Line
    from kvtrie.demo.model import Speaker

RESULTS = Path("target") / "eval-fusion.jsonl"
QUICK = 2
WIDTH = 200
INTERRUPTED = 130


class Evaluation:
    """A run: what is measured already, and what is still to be.

    Args:
        speaker: the model.
        trial: where cases are fused.
        given: the command's arguments.
    """

    def __init__(self, speaker: Speaker, trial: Trial, given: argparse.Namespace) -> None:
        self._speaker = speaker
        self._trial = trial
        self._given = given
        self._sizes = _sizes(given)
        self.records: dict[Key, Record] = read(given.results, trial.world)
        self.rows: list[Row] = rows_of(trial.layers)
        self._reuse = self.rows[0].settings[0]

    def run(self) -> None:
        """Measure what is missing: all settings on even seeds, then the chosen ones on odd."""
        given = self._given
        settings = [setting for row in self.rows for setting in row.settings]
        self._measure("even seeds", range(0, 2 * given.even, 2), settings)
        self._measure("odd seeds", range(1, 2 * given.odd, 2), self.chosen())

    def chosen(self) -> list[Setting]:
        """Per row the setting that is reported."""
        return [choose(row, self.records, self._reuse) for row in self.rows]

    def lines(self) -> list[Line]:
        """The rows that were measured on odd seeds."""
        both = zip(self.rows, self.chosen(), strict=True)
        lines = (line_of(row, setting, self.records, self._reuse) for row, setting in both)
        return [line for line in lines if line is not None]

    def _measure(self, what: str, seeds: Sequence[int], settings: Sequence[Setting]) -> None:
        missing: list[tuple[str, int, list[Setting]]] = []
        for seed in seeds:
            for kind in self._given.kinds:
                left = [each for each in settings if (kind, seed, str(each)) not in self.records]
                if left:
                    missing.append((kind, seed, left))
        for kind, seed, left in watched(missing, what, quiet=self._given.json):
            case = case_of(self._speaker, kind, seed, self._sizes)
            for record in self._trial.measure(case, left):
                append(self._given.results, record)
                self.records[record.key] = record


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is missing, then print all of it."""
    given = _parse(arguments)
    torch.set_num_threads(given.threads)
    errors = Console(stderr=True, highlight=False)
    try:
        speaker = tiny() if given.quick else smollm(errors)
    except ConfigError as error:
        errors.print(str(error), markup=False)
        return 2
    with closing(Trial(speaker, _sizes(given))) as trial:
        evaluation = Evaluation(speaker, trial, given)
        try:
            if not given.report:
                evaluation.run()
        except KeyboardInterrupt:
            errors.print(
                f"interrupted: {len(evaluation.records)} figures are in {given.results}, the same "
                "command goes on from there, and --report shows them",
                soft_wrap=True,
            )
            return INTERRUPTED
        return _tell(evaluation, trial.world, given)


def _tell(evaluation: Evaluation, world: str, given: argparse.Namespace) -> int:
    lines = evaluation.lines()
    reported, choosing = (
        len({(kind, seed) for kind, seed, _ in evaluation.records if seed % 2 == odd})
        for odd in (True, False)
    )
    title = f"{world}: {reported} cases of odd seeds, settings chosen on {choosing} of even ones"
    if lines and given.picture:
        draw(given.picture, title, lines, given.kinds)
    if given.json:
        about = place() | {
            "world": world,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "threads": given.threads,
            "cases": {"even": choosing, "odd": reported},
        }
        document = {"about": about, "rows": [line.as_dict() for line in lines]}
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
        return 0
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    console.print(table_of(lines, given.kinds, title), markup=False)
    for told in (LEGEND, *goals_of(lines)):
        console.print(told, markup=False)
    if lines and given.picture:
        console.print(f"Picture: {given.picture}")
    return 0


def _sizes(given: argparse.Namespace) -> Sizes:
    return Sizes(given.chunks, given.chunk_tokens, given.answer_tokens)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benches.eval_fusion", description=__doc__.partition("\n")[0]
    )
    number = {"type": int, "metavar": "N"}
    parser.add_argument("--even", **number, help="even seeds of each kind (default: 16)")
    parser.add_argument("--odd", **number, help="odd seeds of each kind (default: 16)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="of cases")
    parser.add_argument("--chunks", **number, default=5, help="of a context")
    parser.add_argument("--chunk-tokens", **number, default=128, help="of each chunk")
    parser.add_argument("--answer-tokens", **number, default=63, help="of running text")
    parser.add_argument("--threads", **number, default=1, help="one, or CPU time counts waiting")
    parser.add_argument("--results", type=Path, help=f"where figures go (default: {RESULTS})")
    parser.add_argument("--picture", type=Path, help="default: beside the results")
    parser.add_argument("--report", action="store_true", help="measure nothing, show what is there")
    parser.add_argument("--quick", action="store_true", help="a random model and few seeds")
    parser.add_argument("--json", action="store_true", help="print one document, no table")
    given = parser.parse_args(arguments)
    seeds = QUICK if given.quick else 16
    given.even, given.odd = (seeds if each is None else each for each in (given.even, given.odd))
    given.results = given.results or RESULTS
    given.picture = given.picture or given.results.with_suffix(".png")
    if given.even < 0 or given.odd < 1:
        parser.error(f"{given.even} even and {given.odd} odd seeds: at least 0 and 1 wanted")
    if given.chunks < FEWEST or given.chunk_tokens < 32 or given.answer_tokens < 1:
        parser.error(
            f"{given.chunks} chunks of {given.chunk_tokens} tokens, answers of "
            f"{given.answer_tokens}: at least {FEWEST}, 32 and 1 wanted"
        )
    return given


if __name__ == "__main__":
    sys.exit(main())
