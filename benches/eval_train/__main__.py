"""Exact matches after training under a policy: SmolLM2 with LoRA on `Recall`, in few rows.

    make eval-train
    make eval-train ARGS="--quick"

Exact matches on held-out cases *under the policy*: untrained, trained under the policy, and, as
control, trained as long on the same batches with a dense cache; and the untrained model with a
dense cache. Each arm trains a third of the way at two learning rates and continues with the one of
the smaller loss on its own validation cases. The policy is h2o that scores the prefill by its last
96 queries: by default the first eviction has no scores, and the facts are where it evicts.
Adapters are kept next to the records, and a run resumes from them. `--quick` runs a random model
over few and short cases.
Cost: about an hour on two cores per seed.
"""

from __future__ import annotations

import math
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from benches.evaluation import Cell, Evaluation, evaluate, table_of
from benches.record import Result, document
from kvtrie.cli.progress import watched
from kvtrie.demo.model import Speaker, smollm, tiny
from kvtrie.selective import CacheSettings
from kvtrie.train import (
    LongContextGradients,
    LoraSettings,
    OptimizerSettings,
    Recall,
    make_head,
)
from kvtrie.train.data import collate
from kvtrie.train.lora import with_lora
from kvtrie.train.optimisers import make_optimizer

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from benches.evaluation import Key

RATES = (3e-4, 1e-3)
ARMS = ("policy", "dense")
GOAL = 15.0
SEVERAL = 1.96
BATCH = 2


@dataclass(frozen=True, slots=True)
class Record:
    """The figures of one arm.

    Attributes:
        name: seed, arm, and learning rate; with "third" for the first third of the training.
        hits: per held-out case, whether the whole answer was right.
        losses: per optimiser step.
        validation: mean loss on validation cases, under the arm's own cache.
    """

    name: str
    hits: list[int] | None = None
    losses: list[float] | None = None
    validation: float | None = None

    @property
    def key(self) -> tuple[str]:
        """The name."""
        return (self.name,)


class TrainEvaluation(Evaluation[Record]):
    """Two untrained arms, and two that are trained at the better of two learning rates."""

    name = "eval-train"
    record_name = "eval_train.json"
    record = Record

    def __init__(self, given: argparse.Namespace) -> None:
        super().__init__(given)
        quick = given.quick
        self.words, self.rows, self.step = (80, 32, 16) if quick else (465, 128, 32)
        self.cases = 6 if quick else given.cases
        self.sequences = 4 if quick else given.sequences
        self.mark = "quick-" if quick else ""

    @staticmethod
    def options(parser: argparse.ArgumentParser) -> None:
        """Add seeds and numbers of cases; all cores are used."""
        parser.add_argument("--seeds", type=int, default=1)
        parser.add_argument("--cases", type=int, default=100, help="held-out cases per seed")
        parser.add_argument("--sequences", type=int, default=150, help="of training, per arm")
        least = {"seeds": 1, "cases": 1, "sequences": 1}
        parser.set_defaults(least=least, threads=os.cpu_count())

    def stages(self) -> Iterator[tuple[str, Sequence[Cell]]]:
        """Per seed: the untrained arms; per arm both rates, then the better one to the end."""
        for seed in range(self.given.seeds):
            for arm in ARMS:
                yield self._stage(f"{seed} untrained {arm}", partial(self.untrained, seed, arm))
            for arm in ARMS:
                for rate in RATES:
                    third = partial(self.trained, seed, arm, rate, whole=False)
                    yield self._stage(f"{seed} {arm} {rate:g} third", third)
                rate = self.rate(seed, arm)
                whole = partial(self.trained, seed, arm, rate, whole=True)
                yield self._stage(f"{seed} {arm} {rate:g}", whole)

    def _stage(
        self, name: str, figures: Callable[[], dict[str, Any]]
    ) -> tuple[str, Sequence[Cell]]:
        def measure(_: list[Key]) -> Iterator[Record]:
            yield Record(self.mark + name, **figures())

        return name, [Cell([(self.mark + name,)], measure)]

    def of(self, name: str) -> Record:
        """The record of a name."""
        return self.by_key[self.mark + name,]

    def rate(self, seed: int, arm: str) -> float:
        """The learning rate of the smaller validation loss after a third."""
        return min(
            RATES, key=lambda rate: self.of(f"{seed} {arm} {rate:g} third").validation or 0.0
        )

    def found(self) -> list[dict[str, Record]]:
        """Per seed whose arms are all measured, the arms."""
        seeds: list[dict[str, Record]] = []
        with suppress(KeyError):
            for seed in range(self.given.seeds):
                arms = {f"untrained, {arm}": self.of(f"{seed} untrained {arm}") for arm in ARMS}
                for arm in ARMS:
                    rate = self.rate(seed, arm)
                    arms[f"trained, {arm}"] = self.of(f"{seed} {arm} {rate:g}")
                seeds.append(arms)
        return seeds

    def speaker(self) -> Speaker:
        """A fresh model."""
        return tiny(layers=2, heads=4) if self.given.quick else smollm(Console(stderr=True))

    def settings(self, arm: str) -> CacheSettings:
        """The cache of an arm, or the one that all are measured under ("policy")."""
        if arm == "dense":
            return CacheSettings("dense-default", 4096, 4096)
        scored = {"prefill_scores": 3 * self.rows // 4}
        return CacheSettings("h2o-default", self.rows, self.step, cache_kwargs=scored)

    def data(self, seed: int, speaker: Speaker) -> Recall:
        """Training, validation and held-out cases of a seed."""
        total = self.sequences + 2 * self.cases
        made = Recall(cases=total, words=self.words, seed=1000 + seed, val_split_fraction=0.0)
        made.prepare(speaker.tokens)
        return made

    def parts(self, data: Recall) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
        """Places of training, of validation and of held-out cases."""
        places, few = data.train.places, max(2, self.cases // 4)
        train = places[: self.sequences]
        rest = places[self.sequences :]
        return train, rest[:few], rest[few : few + self.cases]

    def judged(
        self, tool: LongContextGradients, data: Recall, places: Sequence[int]
    ) -> tuple[list[int], float]:
        """Per case, whether the whole answer is named; the mean loss."""
        found: list[int] = []
        losses: list[float] = []
        for lo in range(0, len(places), BATCH):
            made = collate([data.case(at) for at in places[lo : lo + BATCH]])
            loss = tool.loss(made.input_ids, made.targets, attention_mask=made.attention_mask)
            losses.append(float(loss))
            assert tool.right is not None
            found += (tool.right == tool.head.num_target_entries(made.targets)).long().tolist()
        return found, sum(losses) / len(losses)

    def untrained(self, seed: int, arm: str) -> dict[str, Any]:
        """The model as it comes, under an arm's cache."""
        speaker = self.speaker()
        data = self.data(seed, speaker)
        head = make_head("next_token_prediction", speaker.model)
        tool = LongContextGradients(speaker.model, head, self.settings(arm))
        return {"hits": self.judged(tool, data, self.parts(data)[2])[0]}

    def trained(self, seed: int, arm: str, rate: float, *, whole: bool) -> dict[str, Any]:
        """An arm at a learning rate, a third of the way or whole, from where it was left.

        Losses, the loss on validation cases under its own cache, and if whole the held-out cases
        under the policy.
        """
        torch.manual_seed(seed)
        speaker = self.speaker()
        data = self.data(seed, speaker)
        train, validation, test = self.parts(data)
        model = with_lora(speaker.model, LoraSettings(r=8, key=True, projection=True, mlp=True))
        head = make_head("next_token_prediction", model)
        own = LongContextGradients(model, head, self.settings(arm))
        weights = [each for each in model.parameters() if each.requires_grad]
        optimizer = make_optimizer(weights, OptimizerSettings(learning_rate=rate, weight_decay=0.0))
        losses: list[float] = []
        path: Path = self.given.results
        left = path.with_name(f"{path.stem}-{self.mark}{seed}-{arm}-{rate:g}.pt")
        if left.exists():
            state = torch.load(left, weights_only=True)
            losses = state["losses"]
            optimizer.load_state_dict(state["optimizer"])
            with torch.no_grad():
                for one, file in zip(weights, state["weights"], strict=True):
                    one.copy_(file)
        model.train()
        total = -(-len(train) // BATCH)
        steps = range(len(losses), total if whole else -(-total // 3))
        for at in watched(steps, f"{arm} {rate:g}", quiet=self.given.json):
            for group in optimizer.param_groups:  # up over a tenth, then down in a line
                group["lr"] = rate * min((at + 1) / max(1, total // 10), 1 - at / total)
            torch.manual_seed(seed * 100_003 + at)
            places = train[at * BATCH : (at + 1) * BATCH]
            made = collate([data.case(place) for place in places])
            optimizer.zero_grad(set_to_none=True)
            loss = own.gradients(made.input_ids, made.targets, attention_mask=made.attention_mask)
            losses.append(float(loss))
            optimizer.step()
            if len(losses) % 10 == 0:
                self.leave(left, losses, optimizer, weights)
        self.leave(left, losses, optimizer, weights)
        model.eval()
        figures: dict[str, Any] = {"losses": losses}
        figures["validation"] = self.judged(own, data, validation)[1]
        if whole:
            judge = LongContextGradients(model, head, self.settings("policy"))
            figures["hits"] = self.judged(judge, data, test)[0]
        return figures

    def leave(
        self,
        path: Path,
        losses: list[float],
        optimizer: torch.optim.Optimizer,
        weights: Sequence[torch.Tensor],
    ) -> None:
        """Keep an adapter, to go on from there; whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        state = {"losses": losses, "optimizer": optimizer.state_dict(), "weights": list(weights)}
        torch.save(state, path.with_suffix(".part"))
        path.with_suffix(".part").replace(path)

    def document(self, about: dict[str, Any]) -> dict[str, Any]:
        """Return the form of `benches.record`."""
        return document(about, rows_of(self.found()))

    def show(self, console: Console) -> None:
        """Print a row per arm, and the goal."""
        columns = {
            "arm": lambda row: row.what,
            "exact": lambda row: f"{row.ours:.1f} ± {row.more['half']:.1f} {row.unit}",
            "goal": lambda row: "" if row.ok is None else "reached" if row.ok else "missed",
        }
        console.print(table_of(self.name, columns, rows_of(self.found())))


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half of its 95 % interval, in points."""
    mean = sum(values) / len(values)
    spread = sum((each - mean) ** 2 for each in values) / max(1, len(values) - 1)
    return 100 * mean, 100 * SEVERAL * math.sqrt(spread / len(values))


def rows_of(found: Sequence[dict[str, Record]]) -> list[Result]:
    """Exact matches of every arm, and what training under the policy is worth."""
    if not found:
        return []
    rows: list[Result] = []
    for arm in found[0]:
        mean, half = interval(hits := [hit for arms in found for hit in arms[arm].hits or ()])
        rows.append(Result(arm, round(mean, 1), "%", more={"half": round(half, 1), "n": len(hits)}))
    policy, control = (
        [hit for arms in found for hit in arms[f"trained, {arm}"].hits or ()] for arm in ARMS
    )
    mean, half = interval([one - other for one, other in zip(policy, control, strict=True)])
    more = {"half": round(half, 1), "n": len(policy)}
    name = "points above the control"
    return [
        *rows,
        Result(name, round(mean, 1), "points", goal=GOAL, ok=mean >= GOAL, more=more),
    ]


def main() -> int:
    """Measure what is missing, then print all of it."""
    return evaluate(TrainEvaluation)


if __name__ == "__main__":
    sys.exit(main())
