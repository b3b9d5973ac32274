"""A training step by cells compared with plain autograd with activation checkpointing.

    make bench-train
    make bench-train ARGS="--quick"

A process each, on one thread, in CPU time: one step that warms up, whose peak of memory beyond
that of the loaded model is noted, then as many as are timed, of which the shortest counts.
The peer attends to everything (dense), so it does more for less: a policy is what both memory and
time are saved by.
Cost: some minutes on one core.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benches.core.place import place
from benches.measure import clear_peak, peak_kilobytes
from benches.record import Result, bounded, document, keep, options, show
from kvtrie.selective import CacheSettings
from kvtrie.train import GradientSettings, LongContextGradients, Run, TrainSettings, make_head
from kvtrie.train.plan import figures

RESULTS = Path(__file__).parents[1] / "results" / "train.json"
PEER = "autograd, activation checkpointing, dense"
TIMES = {4: 1.5, 8: 1.15, 16: 0.75}
GROWTH, SHARE, COSINE = 1.1, 0.25, 0.999
CODED = "torch-quantized8"
VOCABULARY = 1024


def sizes(*, quick: bool) -> tuple[int, int, int]:
    """Rows, tokens of a step, targets."""
    return (32, 8, 16) if quick else (512, 128, 256)


def model_of(*, quick: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=256,
            intermediate_size=704,
            num_hidden_layers=2 if quick else 6,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=1 << 17,
            dtype="float32",
        )
    ).train()


def one(side: str, times: int, rounds: int, *, quick: bool) -> dict[str, Any]:
    """Measure one side in this process."""
    model = model_of(quick=quick)
    length, new, width = sizes(quick=quick)
    ids = torch.randint(VOCABULARY, (1, times * length))
    targets = torch.randint(VOCABULARY, (1, width))
    coded = CODED if side == "coded" else None
    grad = GradientSettings(layercp_qname=coded, cachecp_qname=coded)
    cache = CacheSettings("h2o-default", length, new)
    head = make_head("next_token_prediction", model)
    tool = LongContextGradients(model, head, cache, grad, yarn_rope=False)

    def ours() -> None:
        tool.gradients(ids, targets)

    def peer() -> None:
        hidden = model.model(ids, use_cache=False).last_hidden_state[:, -width:]
        torch.nn.functional.cross_entropy(model.lm_head(hidden)[0], targets[0]).backward()

    if side == "peer":
        model.activation_checkpointing_enable({"use_reentrant": False})
    step = peer if side == "peer" else ours
    tool.loss(ids[:, :new], targets[:, :new])  # load everything that first use loads
    before = clear_peak()
    step()
    found: dict[str, Any] = {"mb": (peak_kilobytes() - before) / 1e3}
    grads = [each.grad.clone() for each in model.parameters() if each.grad is not None]
    spent = []
    for _ in range(rounds):
        model.zero_grad()
        start = time.process_time()
        step()
        spent.append(time.process_time() - start)
    found["seconds"] = min(spent, default=0.0)
    if side == "peer":
        return found
    run = Run(out_dir="-", kv_cache=cache, grad=grad, train=TrainSettings(micro_batch_size=1))
    found["checkpoints"] = tool.checkpoint_bytes / 1e6
    found["planned"] = figures(model, run, times * length, targets=width).checkpoints / 1e6
    if side == "coded":
        model.zero_grad()
        plain = LongContextGradients(model, head, cache, yarn_rope=False)
        plain.gradients(ids, targets)
        exact = [each.grad for each in model.parameters() if each.grad is not None]
        both = [torch.cat([each.flatten().double() for each in some]) for some in (grads, exact)]
        found["cosine"] = float(torch.nn.functional.cosine_similarity(*both, dim=0))
        found["plain"] = plain.checkpoint_bytes / 1e6
    return found


def apart(side: str, times: int, given: argparse.Namespace) -> dict[str, Any]:
    """The same in another process, unless sizes are small."""
    if given.quick:
        return one(side, times, given.rounds, quick=True)
    words = [sys.executable, "-m", "benches.train", "--one", side, str(times)]
    words += ["--rounds", str(given.rounds)]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def measure(given: argparse.Namespace) -> list[Result]:
    """All rows."""
    rows: list[Result] = []
    ours: dict[int, dict[str, Any]] = {}
    peers: dict[int, dict[str, Any]] = {}
    for times, most in TIMES.items():
        if given.quick and times not in {4, 16}:
            continue
        ours[times], peers[times] = (apart(side, times, given) for side in ("ours", "peer"))
        both = [found[times]["seconds"] for found in (ours, peers)]
        rows.append(bounded(f"step {times} L", *both, "s", PEER, most))
    bare = [ours[times]["mb"] - ours[times]["checkpoints"] for times in (16, 4)]
    rows.append(bounded("memory without checkpoints, 16 L", *bare, "MB", "at 4 L", GROWTH))
    whole = [found[16]["mb"] for found in (ours, peers)]
    rows.append(bounded("memory with checkpoints, 16 L", *whole, "MB", PEER, SHARE))
    stated = [ours[16][name] for name in ("checkpoints", "planned")]
    rows.append(bounded("checkpoints, 16 L", *stated, "MB", "as planned", 1.0))
    coded = apart("coded", 16, given)
    stated = [coded[name] for name in ("checkpoints", "planned")]
    rows.append(bounded("checkpoints of 8 bits, 16 L", *stated, "MB", "as planned", 1.0))
    rows.append(
        Result(
            "gradient's cosine, checkpoints of 8 bits",
            round(coded["cosine"], 6),
            "",
            1.0,
            "exact checkpoints",
            round(coded["cosine"], 6),
            COSINE,
            coded["cosine"] >= COSINE,
        )
    )
    return rows


def main() -> int:
    """Measure, print and keep."""
    parser = options(__doc__, RESULTS)
    parser.add_argument("--rounds", type=int, default=None, help="timed steps (default: 3)")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.rounds = given.rounds or (1 if given.quick else 3)
    torch.set_num_threads(1)
    if given.one:
        print(json.dumps(one(given.one[0], int(given.one[1]), given.rounds, quick=given.quick)))
        return 0
    rows = measure(given)
    if not keep(given, document(place() | {"torch": torch.__version__}, rows)):
        show(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
