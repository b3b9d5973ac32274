"""What a policy keeps of a real model: on running text, and on two facts far back.

    make eval-selective
    make eval-selective ARGS="--text 4 --facts 8"
    make eval-selective ARGS="--quick"

SmolLM2-135M in float32 reads 1024 tokens in half or a quarter as many rows. `text`: NLL of the next
128 tokens above the dense model's, and KL from it. `facts`: two access codes in the first 84
tokens, asked for behind the last; exact match. Even seeds choose each policy's settings and the
three best policies of each kind, odd seeds are reported, with 95 % intervals; those three also on
codes, and kvpress beside them where it is installed (`make peers ARGS=kvpress`). Every figure is
appended to a file as soon as it is measured; the same command goes on from there.
Cost: some seconds a case, budget and setting; the time left is printed. `--quick`: a random model.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from rich.console import Console

from benches.core.place import place
from benches.eval_fusion.prose import prose
from benches.eval_selective.beside import Beside, Member
from kvtrie.demo.model import smollm, tiny
from kvtrie.selective.names import policy_names

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtrie.demo.model import Speaker

RESULTS = Path("target") / "eval-selective.jsonl"
KINDS = ("text", "facts")
PEER = Path(__file__).parents[1] / "peers" / "envs" / "kvpress"
RECORD = Path(__file__).parents[1] / "results" / "selective_eval.json"
BUDGETS = {"1/2": 2, "1/4": 4}
MIXES = ("mix-h2o+keydiff", "mix-snapkv+keydiff")
CODED = ("torch-quantized8", "int8")
GOALS = (
    "goals: text at most .04 nats above dense at 1/4, .02 at 1/2; facts at least .8 of dense's at "
    "1/2; one mix at most .05 on text and at least .5 of dense's facts at 1/2; codes add .003"
)


Key: TypeAlias = tuple[str, int, str, str, str, str]
"""Kind, seed, policy, setting, buffers, budget."""

Case: TypeAlias = tuple[list[int], list[tuple[list[int], list[int]]]]
"""What is read, and (what is asked behind it, what should come) of it."""


@dataclass(frozen=True, slots=True)
class Figure:
    """What one setting came to on one case: `value` is nats above dense, or the share of facts."""

    world: str
    kind: str
    seed: int
    policy: str
    setting: str
    buffers: str
    budget: str
    value: float
    kl: float

    @property
    def key(self) -> Key:
        """What it is found by."""
        return self.kind, self.seed, self.policy, self.setting, self.buffers, self.budget


def settings_of(kind: str, policy: str, rows: int) -> dict[str, dict[str, object]]:
    """Arguments that even seeds choose among; a long grace period is of use to text alone."""
    if policy == "dense":
        return {"": {}}
    if policy == "lastrec":
        return {"4 sinks": {"sinks": 4}}
    if policy == "h2o-orig":
        return {"": {}}
    few: dict[str, object] = {"sinks": 4, "grace_period": min(32, rows // 4)}
    half: dict[str, object] = {**few, "grace_period": rows // 2}
    found = {"short grace": few, "half grace": half}
    if policy.startswith("h2o"):
        found["half grace, prefill scored"] = {**half, "prefill_scores": 32}
    if kind == "text":
        found["long grace"] = {**few, "grace_period": 3 * rows // 4}
    return found


class Evaluation:
    """Figures that are there, and what is still to be measured."""

    def __init__(self, speaker: Speaker, given: argparse.Namespace) -> None:
        self.speaker, self.model, self.given = speaker, speaker.model, given
        self.tokens, self.behind, self.chunk = (96, 16, 16) if given.quick else (1024, 128, 64)
        self.world = f"{speaker.name}, {self.tokens} tokens, steps of {self.chunk}, side by side"
        self.figures: dict[Key, Figure] = {}
        self._truth: tuple[tuple[str, int], torch.Tensor | None] | None = None
        lines = given.results.read_text().splitlines() if given.results.exists() else []
        for line in lines:
            try:
                figure = Figure(**json.loads(line))
            except (ValueError, TypeError):
                continue  # cut off while it was written
            if figure.world == self.world:
                self.figures[figure.key] = figure

    # ------------------------------------------------------------------------------- a case

    def run(self, kind: str) -> None:
        """Even seeds for every setting, then odd ones for what they chose."""
        policies = [name for name in policy_names() if name != "dense" and name[0] != "q"]
        policies = [*policies, *MIXES]
        if self.given.quick:
            policies = ["lastrec", "h2o", MIXES[0]]
        count = self.count(kind)
        even = range(0, count + count % 2, 2)
        places = [(budget, policy) for budget in BUDGETS for policy in policies]
        all_settings = [
            (kind, seed, policy, setting, "default", budget)
            for seed in even[: self.choosing(kind)]
            for budget, policy in places
            for setting in settings_of(kind, policy, self.tokens // BUDGETS[budget])
        ]
        self.measure("every setting", all_settings)
        chosen = {place: self.best(kind, *place) for place in places}

        def keys(seeds: Sequence[int], pairs: Sequence[tuple[str, str]], buffers: str) -> list[Key]:
            return [
                (kind, seed, policy, chosen[budget, policy], buffers, budget)
                for seed in seeds
                for budget, policy in pairs
            ]

        self.measure("every policy, even seeds", keys(even, places, "default"))
        self.measure("every policy, odd seeds", keys(range(1, count, 2), places, "default"))
        three = [
            (budget, policy)
            for budget in BUDGETS
            for policy in sorted(
                policies, key=lambda name: self.order(kind, budget, name, chosen[budget, name])
            )[:3]
        ]
        more = [
            key
            for buffers in ("default", *CODED)
            for key in keys(range(1, 2 * count, 2), three, buffers)
        ]
        self.measure("the best three, twice as many and on codes", more)
        self.beside(kind)

    def beside(self, kind: str) -> None:
        """The same odd cases by kvpress, where it is installed: figures of its own."""
        done = {
            each.seed
            for each in self.figures.values()
            if each.kind == kind and each.policy.startswith("kvpress")
        }
        seeds = [seed for seed in range(1, 2 * self.count(kind), 2) if seed not in done]
        if not (PEER / ".ready").exists() or not seeds:
            return
        cases = [(seed, *self.case(kind, seed)) for seed in seeds]
        with TemporaryDirectory() as folder:
            self.model.save_pretrained(folder)
            document = {
                "world": self.world,
                "budgets": {name: self.tokens // of for name, of in BUDGETS.items()},
                "cases": [
                    {"kind": kind, "seed": seed, "row": row, "asked": asked}
                    for seed, row, asked in cases
                ],
            }
            (Path(folder) / "cases.json").write_text(json.dumps(document))
            command = [PEER / "bin" / "python", "-m", "benches.peers.kvpress_presses", folder]
            with Popen(command, stdout=PIPE, text=True) as running:
                assert running.stdout is not None
                for line in running.stdout:
                    self.keep(Figure(**json.loads(line)))
        if running.returncode:
            sys.stderr.write(f"kvpress ended with {running.returncode}\n")

    def count(self, kind: str) -> int:
        """Cases of a kind."""
        return self.given.text if kind == "text" else self.given.facts

    def choosing(self, kind: str) -> int:
        """Even seeds that a policy's setting is chosen by; the policies, by all even ones."""
        return max(1, (self.count(kind) + 2) // 4)

    def best(self, kind: str, budget: str, policy: str) -> str:
        """The setting of a policy that even seeds say is best."""
        names = list(settings_of(kind, policy, self.tokens // BUDGETS[budget]))
        most = 2 * self.choosing(kind)
        return min(names, key=lambda name: self.order(kind, budget, policy, name, most))

    def order(
        self, kind: str, budget: str, policy: str, setting: str, most: int | None = None
    ) -> float:
        """Small where even seeds (below `most`) say good."""
        found = [
            each.value
            for each in self.figures.values()
            if (each.kind, each.budget, each.policy, each.setting, each.buffers)
            == (kind, budget, policy, setting, "default")
            and each.seed % 2 == 0
            and (most is None or each.seed < most)
        ]
        mean = float(np.mean(found)) if found else 0.0
        return mean if kind == "text" else -mean

    def measure(self, what: str, wanted: Sequence[Key]) -> None:
        """Whatever of this is not there yet, all of a case and budget in one pass of the model."""
        groups: dict[tuple[str, int, str], list[Key]] = {}
        for key in dict.fromkeys(wanted):
            if key not in self.figures:
                groups.setdefault((key[0], key[1], key[5]), []).append(key)
        began, total = perf_counter(), sum(map(len, groups.values()))
        done = 0
        for (kind, seed, budget), keys in sorted(groups.items()):
            case = self.case(kind, seed)
            truth = self.truth(kind, seed)
            rows = self.tokens // BUDGETS[budget]
            members = [
                (f"{policy}-{buffers}", settings_of(kind, policy, rows)[setting])
                for _, _, policy, setting, buffers, _ in keys
            ]
            for key, (value, kl) in zip(keys, self.read(case, members, rows, truth), strict=True):
                self.keep(Figure(self.world, *key, value, kl))
            done += len(keys)
            left = (perf_counter() - began) / done * (total - done) / 60
            if not self.given.json:
                sys.stderr.write(
                    f"{kind}: {what}, {done} of {total}, {left:.0f} minutes left of this\n"
                )

    def truth(self, kind: str, seed: int) -> torch.Tensor | None:
        """What the dense model says of a text; the share of facts that it tells is noted."""
        key = (kind, seed)
        if self._truth is None or self._truth[0] != key:
            case = self.case(kind, seed)
            rows = len(case[0]) + 200
            if kind == "text":
                self._truth = key, self.behind_of(case, [("dense-default", {})], rows)[0]
            else:
                told = self.told(case, [("dense-default", {})], rows)[0]
                dense = Figure(self.world, kind, seed, "dense", "", "default", "all", told, 0.0)
                if dense.key not in self.figures:
                    self.keep(dense)
                self._truth = key, None
        return self._truth[1]

    def keep(self, figure: Figure) -> None:
        """Append one line."""
        self.figures[figure.key] = figure
        self.given.results.parent.mkdir(parents=True, exist_ok=True)
        with self.given.results.open("a") as file:
            file.write(json.dumps(asdict(figure)) + "\n")

    def case(self, kind: str, seed: int) -> Case:
        """What is read, and (what is asked behind it, what should come) of it."""
        draw = np.random.default_rng([seed, kind == "facts"])
        if kind == "text":
            row = prose(self.speaker, draw, self.tokens + self.behind)
            return row[: self.tokens], [([], row[self.tokens :])]
        names = draw.choice(["Bergen", "Cadiz", "Dover", "Essen", "Faro", "Riga"], 2, replace=False)
        codes = [str(code) for code in 1000 + draw.choice(9000, 2, replace=False)]
        facts = [
            self.speaker.tokens(f" The access code of {name} is {code}.\n\n")
            for name, code in zip(names, codes, strict=True)
        ]
        filler = prose(self.speaker, draw, self.tokens)
        first, room = 84 - sum(map(len, facts)), 20
        row = [*filler[:room], *facts[0], *filler[room:first], *facts[1], *filler[first:]]
        asked = [
            (
                self.speaker.tokens(f"\n\nThe access code of {name} is"),
                self.speaker.tokens(f" {code}"),
            )
            for name, code in zip(names, codes, strict=True)
        ]
        return row[: self.tokens], asked

    @torch.no_grad()
    def read(
        self, case: Case, members: Sequence[Member], rows: int, truth: torch.Tensor | None
    ) -> list[tuple[float, float]]:
        """Per member nats above dense and KL from it, or the share of facts."""
        if truth is None:
            return [(share, 0.0) for share in self.told(case, members, rows)]
        ids = torch.tensor(case[1][0][1])[:, None]
        found: list[tuple[float, float]] = []
        for got in self.behind_of(case, members, rows):
            above = (truth.gather(1, ids) - got.gather(1, ids)).mean()
            kl = (truth.exp() * (truth - got)).sum(dim=1).mean()
            found.append((float(above), float(kl)))
        return found

    @torch.no_grad()
    def told(self, case: Case, members: Sequence[Member], rows: int) -> list[float]:
        """The share of facts that each member tells: all tokens of an answer the likeliest."""
        row, asked = case
        with Beside(self.model, members, rows, self.chunk) as cache:
            cache.logits(row, keep=1)
            kept = cache.kept()
            right: list[torch.Tensor] = []
            for question, answer in asked:
                cache.back(kept)
                logits = cache.logits([*question, *answer[:-1]], keep=len(answer))
                right.append((logits.argmax(dim=-1) == torch.tensor(answer)).all(dim=1))
        return torch.stack(right).float().mean(dim=0).tolist()

    @torch.no_grad()
    def behind_of(self, case: Case, members: Sequence[Member], rows: int) -> list[torch.Tensor]:
        """Log-probabilities of each token behind what was read, in steps of a quarter."""
        row, [(_, answer)] = case
        step = max(1, self.behind // 4)
        with Beside(self.model, members, rows, self.chunk) as cache:
            parts = [answer[at : at + step] for at in range(0, len(answer) - 1, step)]
            parts[-1] = parts[-1][: len(answer) - 1 - (len(parts) - 1) * step]
            logits = [cache.logits(row, keep=1), *map(cache.logits, parts)]
        return [each.log_softmax(dim=-1) for each in torch.cat(logits, dim=1)]

    # ------------------------------------------------------------------------------- report

    def rows(self) -> list[dict[str, object]]:
        """Means over odd seeds, with intervals."""
        groups: dict[tuple[str, ...], list[Figure]] = {}
        for each in self.figures.values():
            if each.seed % 2:
                key = (each.kind, each.budget, each.policy, each.setting, each.buffers)
                groups.setdefault(key, []).append(each)
        made: list[dict[str, object]] = []
        for key, figures in sorted(groups.items()):
            values = np.array([each.value for each in figures])
            half = 1.96 * values.std(ddof=1) / len(values) ** 0.5 if len(values) > 1 else 0.0
            names = ("kind", "budget", "policy", "setting", "buffers")
            made.append(
                dict(zip(names, key, strict=True))
                | {
                    "mean": round(float(values.mean()), 4),
                    "half": round(float(half), 4),
                    "kl": round(float(np.mean([each.kl for each in figures])), 4),
                    "cases": len(values),
                }
            )
        return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is missing, then print all of it."""
    parser = argparse.ArgumentParser(prog="python -m benches.eval_selective")
    parser.add_argument("--text", type=int, help="cases of running text (default: 10)")
    parser.add_argument("--facts", type=int, help="cases of two facts (default: 20)")
    parser.add_argument("--kind", choices=KINDS, help="one kind only (default: both, at once)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where figures go")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    parser.add_argument("--quick", action="store_true", help="a random model and few cases")
    parser.add_argument("--record", action="store_true", help="and keep it in benches/results")
    parser.add_argument("--json", action="store_true", help="print one document")
    given = parser.parse_args(arguments)
    given.text = given.text or (2 if given.quick else 10)
    given.facts = given.facts or (2 if given.quick else 20)
    words = list(sys.argv[1:] if arguments is None else arguments)
    if given.kind is None and not given.report:
        command = [sys.executable, "-m", "benches.eval_selective", *words, "--kind"]
        both = [Popen([*command, kind], stdout=DEVNULL) for kind in KINDS]
        try:
            ends = [each.wait() for each in both]
            if any(ends):
                return 1
        except KeyboardInterrupt:
            return 130
    torch.set_num_threads(1)
    console = Console(highlight=False)
    speaker = tiny(layers=2, heads=4) if given.quick else smollm(Console(stderr=True))
    evaluation = Evaluation(speaker, given)
    try:
        if given.kind is not None and not given.report:
            evaluation.run(given.kind)
    except KeyboardInterrupt:
        console.print("interrupted: the same command goes on, --report shows what is there")
        return 130
    rows = evaluation.rows()
    about = place() | {"world": evaluation.world, "torch": torch.__version__}
    document = {"about": about, "goals": GOALS, "rows": rows}
    if given.record:
        RECORD.write_text(json.dumps(document, indent=1) + "\n")
    if given.json:
        sys.stdout.write(json.dumps(document) + "\n")
        return 0
    console.print(evaluation.world)
    for row in rows:
        name = f"{row['policy']}-{row['buffers']} {row['setting']}"
        console.print(
            f"{row['kind']:6}{row['budget']:4} {name:42} {row['mean']:8.4f} ± {row['half']:.4f}"
            f"  {row['cases']} cases",
            markup=False,
        )
    console.print(GOALS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
