"""From how many queries on padding them to a square beats torch's kernel under a mask.

    python -m benches.selective.padding            # prints what it finds on the CPU
    python -m benches.selective.padding --write --device cuda

`--write` puts the points into python/kvtrie/kernels/padding.json, read by
`attend_without_weights`.
Heads are those of a small model: 9 of queries, 3 of K and V, of 64 numbers.
Cost: some minutes on one core, seconds on a card.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import torch

from kvtrie.kernels import attend_masked, attend_padded

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

FILE = Path(__file__).parents[2] / "python" / "kvtrie" / "kernels" / "padding.json"
HEADS, GROUPS, DIM = 9, 3, 64
ROWS = (256, 1024, 4096)


def seconds(work: Callable[[], object], device: str, rounds: int) -> float:
    """Median of a call; on a card until it is done."""
    found: list[float] = []
    for at in range(rounds + 1):
        start = time.perf_counter() if device == "cuda" else time.process_time()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        end = time.perf_counter() if device == "cuda" else time.process_time()
        if at:  # the first round warms up
            found.append(end - start)
    return median(found)


def least(rows: int, device: str, rounds: int) -> tuple[int | None, float]:
    """The least power of two of queries from which padding wins up to a square, and how near."""
    bound, nearest, new = None, 0.0, rows // 2
    while new:
        query = torch.randn(1, HEADS, new, DIM, device=device)
        keys, values = torch.randn(2, 1, GROUPS, rows, DIM, device=device)
        pos = torch.rand(1, GROUPS, rows, device=device).argsort(dim=-1)
        sides = (
            lambda: attend_masked(query, keys, values, token_pos=pos, input_pos=rows - new),  # noqa: B023
            lambda: attend_padded(query, keys, values, token_pos=pos),  # noqa: B023
        )
        masked, padded = (seconds(side, device, rounds) for side in sides)
        nearest = max(nearest, masked / padded)
        if padded >= masked:
            break
        bound, new = new, new // 2
    return bound, nearest


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and, if asked, store."""
    parser = argparse.ArgumentParser(prog="python -m benches.selective.padding")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="into kvtrie's table")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    points: list[tuple[int, int | None]] = []
    for rows in given.rows:
        bound, nearest = least(rows, given.device, given.rounds)
        points.append((rows, bound))
        finding = "never pays" if bound is None else f"pays from {bound} queries on"
        print(f"{rows} rows: {finding}; at best {nearest:.2f} times as fast as under a mask")
    if given.write:
        recorded = json.loads(FILE.read_text())
        recorded["points"][given.device] = points
        FILE.write_text(json.dumps(recorded) + "\n")
    return 0


if __name__ == "__main__":
    main()
