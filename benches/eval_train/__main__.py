"""What training under a policy is worth: SmolLM2 with LoRA on `Recall`, in few rows.

    make eval-train
    make eval-train ARGS="--quick"

Exact matches on held-out cases *under the policy*: untrained, trained under the policy, and, as
control, trained as long on the same batches with a dense cache. Each arm trains a third of the way
at two learning rates and goes on with the one of the smaller loss on its own validation cases.
Beside them the untrained model with a dense cache. The policy is h2o that scores the prefill by its
last 96 queries: by default the first eviction is blind, and the facts stand where it strikes.
Figures are appended to `target/eval-train.jsonl` as they are measured, adapters lie beside it, and
the same command goes on from there. `--quick` runs a random model over few and short cases.
Cost: about an hour on two cores per seed.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from benches.core.place import place
from benches.record import Result, document, write
from kvtrie.canvas import INK, figure, save
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
    from collections.abc import Sequence

RESULTS = Path(__file__).parents[1] / "results" / "eval_train.json"
FILE = Path("target/eval-train.jsonl")
RATES = (3e-4, 1e-3)
ARMS = ("policy", "dense")
GOAL = 15.0
SEVERAL = 1.96


class Evaluation:
    """Measures what is not in the file yet."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.file = given, Path(given.results)
        self.known: dict[str, dict[str, Any]] = {}
        if self.file.exists():
            for line in self.file.read_text().splitlines():
                try:
                    read = json.loads(line)
                except ValueError:
                    continue  # a crash may leave half a line
                self.known[read["name"]] = read
        quick = given.quick
        self.words, self.rows, self.step = (80, 32, 16) if quick else (465, 128, 32)
        self.cases = 6 if quick else given.cases
        self.sequences = 4 if quick else given.sequences
        self.batch = 2
        self.mark = "quick-" if quick else ""
        self.left = 0
        self.spent = 0.0

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

    def read(self, name: str, how: Any) -> dict[str, Any]:
        """A figure from the file, or measured and appended."""
        if name not in self.known:
            start = time.monotonic()
            self.known[name] = {"name": name, **how()}
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("a") as file:
                file.write(json.dumps(self.known[name]) + "\n")
            self.spent += time.monotonic() - start
        self.left -= 1
        return self.known[name]

    def judged(
        self, tool: LongContextGradients, data: Recall, places: Sequence[int]
    ) -> tuple[list[int], float]:
        """Per case, whether the whole answer is named; the mean loss."""
        found: list[int] = []
        losses: list[float] = []
        for lo in range(0, len(places), self.batch):
            made = collate([data.case(at) for at in places[lo : lo + self.batch]])
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
        train, validation, held = self.parts(data)
        model = with_lora(speaker.model, LoraSettings(r=8, key=True, projection=True, mlp=True))
        head = make_head("next_token_prediction", model)
        own = LongContextGradients(model, head, self.settings(arm))
        weights = [each for each in model.parameters() if each.requires_grad]
        optimizer = make_optimizer(weights, OptimizerSettings(learning_rate=rate, weight_decay=0.0))
        losses: list[float] = []
        left = self.file.with_name(f"{self.file.stem}-{self.mark}{seed}-{arm}-{rate:g}.pt")
        if left.exists():
            state = torch.load(left, weights_only=True)
            losses = state["losses"]
            optimizer.load_state_dict(state["optimizer"])
            with torch.no_grad():
                for one, kept in zip(weights, state["weights"], strict=True):
                    one.copy_(kept)
        model.train()
        total = -(-len(train) // self.batch)
        for at in range(len(losses), total if whole else -(-total // 3)):
            for group in optimizer.param_groups:  # up over a tenth, then down in a line
                group["lr"] = rate * min((at + 1) / max(1, total // 10), 1 - at / total)
            torch.manual_seed(seed * 100_003 + at)
            places = train[at * self.batch : (at + 1) * self.batch]
            made = collate([data.case(place) for place in places])
            optimizer.zero_grad(set_to_none=True)
            loss = own.gradients(made.input_ids, made.targets, attention_mask=made.attention_mask)
            losses.append(float(loss))
            optimizer.step()
            self.say(f"{arm} {rate:g}: {at + 1}/{total}, loss {losses[-1]:.3f}")
            if len(losses) % 10 == 0:
                self.leave(left, losses, optimizer, weights)
        self.leave(left, losses, optimizer, weights)
        model.eval()
        told: dict[str, Any] = {"losses": losses}
        told["validation"] = self.judged(own, data, validation)[1]
        if whole:
            judge = LongContextGradients(model, head, self.settings("policy"))
            told["hits"] = self.judged(judge, data, held)[0]
        return told

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

    def say(self, text: str) -> None:
        """Show how far it is."""
        if not self.given.json:
            print(
                f"\r{text}, about {self.left} parts left    ", end="", file=sys.stderr, flush=True
            )

    def all(self, seeds: int) -> dict[int, dict[str, dict[str, Any]]]:
        """Per seed, the arms; each trained one at its better learning rate."""
        self.left = seeds * (2 + len(ARMS) * (len(RATES) + 1))
        found: dict[int, dict[str, dict[str, Any]]] = {}
        for seed in range(seeds):
            arms = {
                f"untrained, {arm}": self.read(
                    f"{self.mark}{seed} untrained {arm}",
                    partial(self.untrained, seed, arm),
                )
                for arm in ARMS
            }
            for arm in ARMS:
                thirds = {
                    rate: self.read(
                        f"{self.mark}{seed} {arm} {rate:g} third",
                        partial(self.trained, seed, arm, rate, whole=False),
                    )
                    for rate in RATES
                }
                rate = min(thirds, key=lambda rate: thirds[rate]["validation"])
                arms[f"trained, {arm}"] = self.read(
                    f"{self.mark}{seed} {arm} {rate:g}",
                    partial(self.trained, seed, arm, rate, whole=True),
                )
            found[seed] = arms
        return found


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half of its 95 % interval, in points."""
    mean = sum(values) / len(values)
    spread = sum((each - mean) ** 2 for each in values) / max(1, len(values) - 1)
    return 100 * mean, 100 * SEVERAL * math.sqrt(spread / len(values))


def rows_of(found: dict[int, dict[str, dict[str, Any]]]) -> list[Result]:
    """Exact matches of every arm, and what training under the policy is worth."""
    rows: list[Result] = []
    for arm in next(iter(found.values())):
        hits = [hit for arms in found.values() for hit in arms[arm]["hits"]]
        mean, half = interval(hits)
        rows.append(Result(arm, round(mean, 1), "%", more={"half": round(half, 1), "n": len(hits)}))
    pairs = [
        one - other
        for arms in found.values()
        for one, other in zip(
            arms["trained, policy"]["hits"], arms["trained, dense"]["hits"], strict=True
        )
    ]
    mean, half = interval(pairs)
    more = {"half": round(half, 1), "n": len(pairs)}
    worth = Result("points above the control", round(mean, 1), "points", goal=GOAL, more=more)
    return [*rows, Result(**{**_fields(worth), "ok": mean >= GOAL})]


def _fields(row: Result) -> dict[str, Any]:
    return {name: getattr(row, name) for name in Result.__slots__}


def draw(found: dict[int, dict[str, dict[str, Any]]], path: Path) -> None:
    """The losses of the chosen runs."""
    drawn = figure("Training loss, each arm under its own cache", 5)
    axes = drawn.subplots()
    for name, colour in (("trained, policy", "#1b4f8a"), ("trained, dense", INK)):
        for seed, arms in found.items():
            axes.plot(arms[name]["losses"], color=colour, label=name if not seed else None)
    axes.set_xlabel("optimiser steps")
    axes.set_ylabel("loss")
    axes.legend()
    save(drawn, path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is not known, print and keep."""
    parser = argparse.ArgumentParser(prog="python -m benches.eval_train")
    parser.add_argument("--quick", action="store_true", help="a random model; nothing is kept")
    parser.add_argument("--json", action="store_true", help="print the document")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--cases", type=int, default=100, help="held-out cases per seed")
    parser.add_argument("--sequences", type=int, default=150, help="of training, per arm")
    parser.add_argument("--results", default=str(FILE), help="the file of figures")
    given = parser.parse_args(arguments)
    found = Evaluation(given).all(given.seeds)
    rows = rows_of(found)
    for row in rows:
        verdict = "" if row.ok is None else ("  met" if row.ok else "  missed")
        if not given.json:
            print(f"{row.what:28} {row.ours:6.1f} ± {row.more['half']:.1f} {row.unit}{verdict}")
    draw(found, Path(given.results).with_suffix(".png"))
    kept = document(place() | {"torch": torch.__version__}, rows)
    if given.json:
        print(json.dumps(kept))
    if not given.quick:
        write(RESULTS, kept)
    return 0


if __name__ == "__main__":
    sys.exit(main())
