"""Answers and first-token times of vLLM on this device, with kvtrie and without.

    python -m benches.gpu.vllm_times --only first-token

`answers` compares greedy answers of 300 requests to a random model with a server without kvtrie.
Host memory and disk both supply prompts. `first-token` has SmolLM2 compute prompts of 4,000 tokens
and find them on host, on disk, after a restart, and in vLLM's own offloading.
Cost: a start of vLLM per server.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import median

from rich.console import Console

from benches.engines.__main__ import (
    KINDS,
    WIDE,
    first_token,
    many_requests,
    smollm_folder,
    tiny_folder,
)

ONLY = ("answers", "first-token")


def answers():
    """Figures of many requests at once, and whether no answer differs and both tiers are used."""
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_folder(Path(folder) / "wide", **WIDE)
        many = many_requests(argparse.Namespace(tiny=True), model)
    found = many.get("found", {})
    right = many.get("different") == 0 and all(found.get(tier) for tier in ("host", "disk"))
    return many, right


def first_tokens(given):
    """Milliseconds to the first token by server, and whether every server has answered."""
    model, times, right = smollm_folder(Console(stderr=True)), {}, True
    with tempfile.TemporaryDirectory() as folder:
        for name, what in KINDS.items():
            disk = f"{folder}/kv" if name in {"disk", "restart"} else ""
            more = ["--restarted"] if name == "restart" else []
            report = first_token(given, model, what, disk, *more)
            right = right and "error" not in report
            seen = {
                "computed": report.get("computed_s"),
                "found": [s for s, _ in report.get("found", [])],
            }
            times[name] = {key: 1e3 * median(each) for key, each in seen.items() if each} | {
                key: report[key] for key in ("error",) if key in report
            }
    return times, right


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=ONLY, action="append", help="this part; repeatable")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.set_defaults(dtype="bfloat16")
    given = parser.parse_args()
    parts = {"answers": answers, "first-token": lambda: first_tokens(given)}
    right = True
    for name in given.only or ONLY:
        figures, well = parts[name]()
        sys.stdout.write(json.dumps({name: figures}) + "\n")
        right = right and well
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
