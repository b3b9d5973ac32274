"""Train a tiny model by GRPO on the CPU, with rollouts that share the KV of their prompts.

    python -m examples.rl_rollouts

The tiers are opened again after each update: blocks are named by the weights, so KV of older ones,
which is still in the folder, is not found. All rollouts are sampled a second time without a cache,
with the same random numbers. The exit status is 0 if no token differs, no token came from KV of
older weights, and at most 40 % of the prompt tokens were computed; 1 if not. Cost: seconds.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from tempfile import TemporaryDirectory

from examples.rl_rollouts.grpo import Figures, Settings, train


def main() -> int:
    """Train, print a line per update, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m examples.rl_rollouts")
    parser.add_argument("--updates", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    given = parser.parse_args()
    all_figures: list[Figures] = []
    with TemporaryDirectory() as folder:
        for figures in train(Settings(updates=given.updates), folder):
            all_figures.append(figures)
            if not given.json:
                sys.stdout.write(f"{figures}\n")
    asked = sum(one.prompt_tokens for one in all_figures)
    computed = sum(one.computed for one in all_figures)
    wrong = sum(one.stale + one.differ for one in all_figures)
    if given.json:
        sys.stdout.write(json.dumps([asdict(one) for one in all_figures]) + "\n")
    else:
        sys.stdout.write(
            f"{computed} of {asked} prompt tokens computed, {computed / asked - 1:+.0%} against no "
            f"cache; {wrong} tokens stale or different\n"
        )
    return int(wrong > 0 or computed > 0.4 * asked)


if __name__ == "__main__":
    sys.exit(main())
