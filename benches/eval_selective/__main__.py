"""What a policy keeps of a real model: on running text, and on two facts far back.

    make eval-selective
    make eval-selective ARGS="--text 4 --facts 8"
    make eval-selective ARGS="--quick"

SmolLM2-135M in float32 reads 1024 tokens in half or a quarter as many rows. `text`: NLL of the next
128 tokens above the dense model's, and KL from it. `facts`: two access codes in the first 84
tokens, asked for behind the last; exact match. Even seeds choose each policy's settings and the
three best policies of each kind, odd seeds are reported, with 95 % intervals; those three also on
codes. Every figure is appended to a file as soon as it is measured; the same command goes on from
there.
Cost: some seconds a case, budget and setting; the time left is printed. `--quick`: a random model.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from rich.console import Console

from benches.core.place import place
from benches.eval_fusion.prose import prose
from kvtrie.cli.progress import watched
from kvtrie.demo.model import smollm, tiny
from kvtrie.selective import CacheSettings, SelectiveCache
from kvtrie.selective.names import policy_names

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtrie.demo.model import Speaker

RESULTS = Path("target") / "eval-selective.jsonl"
BUDGETS = {"1/2": 2, "1/4": 4}
MIXES = ("mix-h2o+keydiff", "mix-snapkv+keydiff")
CODED = ("torch-quantized8", "int8")
GOALS = (
    "goals: text at most .04 nats above dense at 1/4, .02 at 1/2; facts at least .8 of dense's at "
    "1/2; one mix at most .05 on text and at least .5 of dense's facts at 1/2; codes add .003"
)


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
    def key(self) -> tuple[object, ...]:
        """What it is found by."""
        return self.kind, self.seed, self.policy, self.setting, self.buffers, self.budget


def settings_of(policy: str, rows: int) -> dict[str, dict[str, object]]:
    """Arguments that even seeds choose among."""
    if policy == "dense":
        return {"": {}}
    if policy == "lastrec":
        return {"4 sinks": {"sinks": 4}}
    if policy == "h2o-orig":
        return {"": {}}
    few = {"sinks": 4, "grace_period": min(32, rows // 4)}
    return {"short grace": few, "half grace": {**few, "grace_period": rows // 2}}


class Evaluation:
    """Figures that are there, and what is still to be measured."""

    def __init__(self, speaker: Speaker, given: argparse.Namespace) -> None:
        self.speaker, self.model, self.given = speaker, speaker.model, given
        self.tokens, self.behind, self.chunk = (96, 16, 16) if given.quick else (1024, 128, 64)
        self.world = f"{speaker.name}, {self.tokens} tokens, steps of {self.chunk}"
        self.figures: dict[tuple[object, ...], Figure] = {}
        lines = given.results.read_text().splitlines() if given.results.exists() else []
        for line in lines:
            try:
                figure = Figure(**json.loads(line))
            except (ValueError, TypeError):
                continue  # cut off while it was written
            if figure.world == self.world:
                self.figures[figure.key] = figure

    # ------------------------------------------------------------------------------- a case

    def run(self) -> None:
        """Even seeds for every setting, then odd ones for what they chose."""
        policies = [name for name in policy_names() if name != "dense" and name[0] != "q"]
        policies = [*policies, *MIXES]
        if self.given.quick:
            policies = ["lastrec", "h2o", MIXES[0]]
        even = [
            (kind, 2 * seed, policy, setting, "default", budget)
            for kind, count in self.counts()
            for seed in range((count + 1) // 2)
            for budget in BUDGETS
            for policy in policies
            for setting in settings_of(policy, self.tokens // BUDGETS[budget])
        ]
        self.measure("even seeds", even)
        chosen = {
            (kind, budget, policy): self.best(kind, budget, policy)
            for kind, _ in self.counts()
            for budget in BUDGETS
            for policy in policies
        }
        odd = [
            (kind, 2 * seed + 1, policy, chosen[kind, budget, policy], "default", budget)
            for kind, count in self.counts()
            for seed in range(count // 2)
            for budget in BUDGETS
            for policy in policies
        ]
        more = [
            (kind, 2 * seed + 1, policy, chosen[kind, budget, policy], buffers, budget)
            for kind, count in self.counts()
            for budget in BUDGETS
            for policy in sorted(policies, key=lambda name: self.order(kind, budget, name))[:3]
            for buffers in ("default", *CODED)
            for seed in range(count)
        ]
        self.measure("odd seeds", odd)
        self.measure("the best, twice as many", more)

    def counts(self) -> list[tuple[str, int]]:
        """Cases of each kind."""
        return [("text", self.given.text), ("facts", self.given.facts)]

    def best(self, kind: str, budget: str, policy: str) -> str:
        """The setting of a policy that even seeds say is best."""
        names = list(settings_of(policy, self.tokens // BUDGETS[budget]))
        return min(names, key=lambda name: self.order(kind, budget, policy, name))

    def order(self, kind: str, budget: str, policy: str, setting: str | None = None) -> float:
        """Small where even seeds say good."""
        found = [
            each.value
            for each in self.figures.values()
            if (each.kind, each.budget, each.policy, each.buffers)
            == (kind, budget, policy, "default")
            and each.seed % 2 == 0
            and setting in {None, each.setting}
        ]
        mean = float(np.mean(found)) if found else 0.0
        return mean if kind == "text" else -mean

    def measure(self, what: str, wanted: Sequence[tuple[object, ...]]) -> None:
        """Whatever of this is not there yet, case by case; the dense model once per case."""
        left = [key for key in dict.fromkeys(wanted) if key not in self.figures]
        left.sort(key=lambda key: (str(key[0]), key[1]))
        truth: tuple[object, object] = (None, None)
        for key in watched(left, what, quiet=self.given.json):
            kind, seed, policy, setting, buffers, budget = key
            case = self.case(kind, seed)
            if truth[0] != (kind, seed):
                truth = ((kind, seed), self.read(case, "dense-default", len(case[0]) + 200, {}))
            rows = self.tokens // BUDGETS[budget]
            arguments = settings_of(policy, rows)[setting]
            got = self.read(case, f"{policy}-{buffers}", rows, arguments)
            value, kl = self.compared(kind, case, truth[1], got)
            figure = Figure(self.world, kind, seed, policy, setting, buffers, budget, value, kl)
            self.figures[key] = figure
            if kind == "facts":
                share = float(np.mean(truth[1]))
                dense = Figure(self.world, kind, seed, "dense", "", "default", budget, share, 0.0)
                self.keep(dense)
            self.keep(figure)

    def keep(self, figure: Figure) -> None:
        """Append one line."""
        self.figures[figure.key] = figure
        self.given.results.parent.mkdir(parents=True, exist_ok=True)
        with self.given.results.open("a") as file:
            file.write(json.dumps(asdict(figure)) + "\n")

    def case(self, kind: str, seed: int) -> tuple[list[int], list[tuple[list[int], list[int]]]]:
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
    def read(self, case, name: str, rows: int, arguments: dict[str, object]) -> object:
        """Log-probabilities of the text behind, or which facts were told."""
        row, asked = case
        told: list[bool] = []
        for question, answer in asked:
            settings = CacheSettings(
                name, cache_length=rows, chunk_size=self.chunk, cache_kwargs=arguments
            )
            with SelectiveCache(self.model, settings) as cache:
                last = cache.read(torch.tensor([row + question]))
                if not question:
                    return self.behind_of(cache, last, answer)
                right = True
                for token in answer:
                    right &= int(last[0].argmax()) == token
                    last = cache.read(torch.tensor([[token]]))
                told.append(right)
        return told

    def behind_of(self, cache, last, answer: list[int]) -> torch.Tensor:
        """Log-probabilities of each token behind what was read, in steps of a quarter."""
        logits, step = [last[None]], max(1, self.behind // 4)
        for at in range(0, len(answer) - 1, step):
            ids = torch.tensor([answer[at : min(at + step, len(answer) - 1)]])
            logits.append(self.model(ids, past_key_values=cache).logits)
        return torch.cat(logits, dim=1)[0].log_softmax(dim=-1)

    def compared(self, kind: str, case, truth, got) -> tuple[float, float]:
        """Nats above dense and KL from it, or the share of facts."""
        if kind == "facts":
            return float(np.mean(got)), 0.0
        ids = torch.tensor(case[1][0][1])[:, None]
        above = (truth.gather(1, ids) - got.gather(1, ids)).mean()
        return float(above), float((truth.exp() * (truth - got)).sum(dim=1).mean())

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
    parser.add_argument("--results", type=Path, default=RESULTS, help="where figures go")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    parser.add_argument("--quick", action="store_true", help="a random model and few cases")
    parser.add_argument("--json", action="store_true", help="print one document")
    given = parser.parse_args(arguments)
    given.text = given.text or (2 if given.quick else 10)
    given.facts = given.facts or (2 if given.quick else 20)
    torch.set_num_threads(1)
    console = Console(highlight=False)
    speaker = tiny(layers=2, heads=4) if given.quick else smollm(Console(stderr=True))
    evaluation = Evaluation(speaker, given)
    try:
        if not given.report:
            evaluation.run()
    except KeyboardInterrupt:
        console.print("interrupted: the same command goes on, --report shows what is there")
        return 130
    rows = evaluation.rows()
    if given.json:
        about = place() | {"world": evaluation.world, "torch": torch.__version__}
        sys.stdout.write(json.dumps({"about": about, "rows": rows}) + "\n")
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
