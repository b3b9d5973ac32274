"""The demo's times to the first token, and those of its simulation by a profile of this machine.

    make bench-sim-demo ARGS="--runs 3 --json"

`kvtrie profile` times the model's passes and the lanes; `kvtrie demo` is played on three tiers
that begin empty; `kvtrie sim` plays the same prompts on the same rooms with the profile's costs
and lanes. The figure is the mean time to the first token, simulated over seen, of the run in the
middle; it may be off by a fifth. Requests come one after the other, far enough apart that none
waits for another.
Cost: a profile and as many demos as there are runs, some minutes each; an idle machine.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from benches.core.place import place
from benches.core.referee import ROOT
from benches.record import Result, document, keep, options
from kvtrie import ModelShape
from kvtrie.demo.chats import CHATS, SYSTEM
from kvtrie.demo.model import smollm, tiny
from kvtrie.sim.config import config_of
from kvtrie.sim.run import run_config

if TYPE_CHECKING:
    from kvtrie.demo.model import Speaker

OUT = ROOT / "benches/results/sim_demo.json"
NEAR = 0.2
APART_NS = 10**12
BLOCK = 16


def output_of(*words: str) -> str:
    """Run a command of kvtrie and return its output."""
    command = (sys.executable, "-m", "kvtrie", *words)
    return subprocess.run(command, check=True, text=True, capture_output=True).stdout


def prompts(speaker: Speaker, turns: list[dict[str, Any]]) -> list[list[int]]:
    """The prompts of a demo, from its answers."""
    histories = [speaker.opening(SYSTEM) for _ in CHATS]
    made: list[list[int]] = []
    for turn in turns:
        chat = turn["chat"] - 1
        prompt = histories[chat] + speaker.turn(CHATS[chat][turn["turn"] - 1])
        made.append(prompt)
        histories[chat] = prompt + [token for token in turn["answer"] if token != speaker.stop]
    return made


def simulated(
    speaker: Speaker, seen: dict[str, Any], profile: Path, folder: Path
) -> dict[str, Any]:
    """The figures of a simulation of a demo."""
    trace = folder / "trace.jsonl"
    with trace.open("w") as file:
        asks = zip(prompts(speaker, seen["turns"]), seen["turns"], strict=True)
        for number, (tokens, turn) in enumerate(asks):
            row = {"arrival_ns": number * APART_NS, "tokens": tokens}
            file.write(json.dumps(row | {"output_tokens": len(turn["answer"])}) + "\n")
    shape = ModelShape.from_config(speaker.model.config, dtype="float32", fingerprint="demo")
    names = ("layers", "kv_heads", "head_dim", "dtype")
    holes = seen["options"]["structure"] == "holes"
    return run_config(
        config_of(
            {
                "trace": {"path": str(trace), "format": "tokens"},
                "model": {name: getattr(shape, name) for name in names},
                "manager": {
                    "block_tokens": BLOCK,
                    "structure": seen["options"]["structure"],
                    "load": "plan",
                },
                "cost": {"kind": "profile", "path": str(profile)},
                "lanes": {"path": str(profile)},
                "tiers": [
                    {**tier, "layer_slots": holes and tier["kind"] != "disk"}
                    for tier in seen["tiers"]
                ],
            },
            folder,
        )
    )


def played(small: bool, profile: Path, answer_tokens: int) -> dict[str, Any]:  # noqa: FBT001
    """A demo and its simulation: mean times in seconds, and tokens found."""
    speaker = tiny() if small else smollm(Console(stderr=True))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = ["--json", "--no-picture", "--answer-tokens", str(answer_tokens)]
        words += ["--disk", str(folder / "disk"), *(["--tiny"] if small else [])]
        seen = json.loads(output_of("demo", *words))
        figures = simulated(speaker, seen, profile, folder)
    turns = seen["turns"]
    return {
        "seen": statistics.fmean(turn["first_s"] for turn in turns),
        "simulated": figures["ttft_ns"]["mean"] / 1e9,
        "found": round(sum(sum(turn["reused"]) for turn in turns)),
        "simulated_found": sum(figures["hit_tokens"].values()),
        "requests": len(turns),
    }


def main() -> int:
    """Profile, play, simulate, record."""
    parser = options(__doc__, OUT)
    parser.add_argument("--runs", type=int, metavar="N", help="demos (default: 5)")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="take this, measure none")
    parser.add_argument("--answer-tokens", type=int, default=4, metavar="N")
    given = parser.parse_args()
    count = given.runs or (1 if given.quick else 5)
    with tempfile.TemporaryDirectory() as name:
        profile = given.profile
        if profile is None:
            profile = Path(name) / "kvtrie.toml"
            model = "tiny" if given.quick else "demo"
            words = ("--model", model, "--longest", "1024", "--repeats", "5")
            output_of("profile", *words, "--disk", str(Path(name) / "disk"), "--out", str(profile))
        # An absolute path would name a temporary folder.
        lanes = tomllib.loads(profile.read_text())["lanes"]
        runs = [played(given.quick, profile.absolute(), given.answer_tokens) for _ in range(count)]
    ratios = [run["simulated"] / run["seen"] for run in runs]
    middle = runs[ratios.index(statistics.median_low(ratios))]
    ratio = middle["simulated"] / middle["seen"]
    row = Result(
        what="ttft.tiny" if given.quick else "ttft",
        ours=round(middle["simulated"], 4),
        unit="s",
        peer=round(middle["seen"], 4),
        peer_name="the demo",
        ratio=round(ratio, 3),
        goal=NEAR,
        ok=abs(ratio - 1) <= NEAR,
        more={"better": "near 1", "ratios": [round(each, 3) for each in ratios]}
        | {"runs": runs, "lanes": lanes},
    )
    if keep(given, document(place(), [row])):
        return 0
    for run, each in zip(runs, ratios, strict=True):
        sys.stdout.write(
            f"first token after {run['simulated']:.3f} s simulated, {run['seen']:.3f} s seen: "
            f"{each:.2f}; tokens found {run['simulated_found']}, {run['found']}\n"
        )
    within = "within" if row.ok else "NOT within"
    sys.stdout.write(f"in the middle {ratio:.2f}: {within} {NEAR:.0%}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
