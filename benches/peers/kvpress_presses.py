"""kvpress over cases that `benches.eval_selective` wrote down; prints a line of JSON per figure.

Run in its own environment (`make peers ARGS=kvpress`): one argument, a folder with `cases.json` and
the model. A press sees the whole prompt's KV and then drops all but the budget's rows; tokens
after the prompt are stored in addition, in full.
Invariant: cases, budgets and figures are those of `kvtrie`; nothing of kvtrie is imported. Cost: a
prefill per case, press and budget.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path

import kvpress
import torch
from transformers import AutoModelForCausalLM, DynamicCache

PRESSES = {
    "knorm": kvpress.KnormPress,
    "keydiff": kvpress.KeyDiffPress,
    "snapkv": kvpress.SnapKVPress,
    "expected": kvpress.ExpectedAttentionPress,
}


@torch.no_grad()
def read(model, row, press):
    """The cache after a prompt, and the logits of its last token."""
    cache, ids = DynamicCache(), torch.tensor([row])
    if press is None:
        return cache, model(ids, past_key_values=cache, logits_to_keep=1).logits[0]
    with press(model):
        return cache, model(ids, past_key_values=cache, logits_to_keep=1).logits[0]


@torch.no_grad()
def behind(model, cache, at, tokens):
    """Logits of each of these tokens, the first at position `at`."""
    places = torch.arange(at, at + len(tokens))[None]
    return model(
        torch.tensor([tokens]), past_key_values=copy.deepcopy(cache), position_ids=places
    ).logits[0]


def text(model, case, press):
    """Log-probabilities of each token after the prompt."""
    [[_, answer]] = case["asked"]
    cache, last = read(model, case["row"], press)
    rest = behind(model, cache, len(case["row"]), answer[:-1])
    return torch.cat((last, rest)).log_softmax(dim=-1)


def facts(model, case, press):
    """The share of questions of which all tokens of the answer are the likeliest."""
    cache, _ = read(model, case["row"], press)
    right = []
    for question, answer in case["asked"]:
        logits = behind(model, cache, len(case["row"]), [*question, *answer[:-1]])
        right.append(torch.equal(logits[-len(answer) :].argmax(dim=-1), torch.tensor(answer)))
    return sum(right) / len(right)


def main(folder):
    """Every case, budget and press."""
    torch.set_num_threads(1)
    given = json.loads((folder / "cases.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for case in given["cases"]:
        truth = text(model, case, None) if case["kind"] == "text" else None
        for budget, rows in given["budgets"].items():
            for name, press in PRESSES.items():
                made = press(compression_ratio=1 - rows / len(case["row"]))
                kl = 0.0
                if truth is None:
                    value = facts(model, case, made)
                else:
                    got = text(model, case, made)
                    ids = torch.tensor(case["asked"][0][1])[:, None]
                    value = (truth.gather(1, ids) - got.gather(1, ids)).mean().item()
                    kl = (truth.exp() * (truth - got)).sum(dim=1).mean().item()
                figure = {
                    "world": given["world"],
                    "kind": case["kind"],
                    "seed": case["seed"],
                    "policy": f"kvpress {name}",
                    "setting": kvpress_version(),
                    "buffers": "default",
                    "budget": budget,
                    "value": value,
                    "kl": kl,
                }
                print(json.dumps(figure), flush=True)


def kvpress_version():
    """The version that was measured."""
    from importlib.metadata import version

    return version("kvpress")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
