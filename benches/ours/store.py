"""Storing runs of blocks with `mark`, and the longest prefix of a sequence, through Python.

A million blocks in chains of 1000; 200 of the chains are kept and their prefixes looked up, as of
the peers. Tokens come as `uint32`, `int32`, `int64` and lists, made before the clock starts.
Cost: about ten seconds.
"""

from __future__ import annotations

import argparse
import gc
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from benches.measure import emit, percentile
from benches.ours.manager import manager
from benches.workload import BLOCK, SEED, VOCABULARY

if TYPE_CHECKING:
    from kvtrie import BlockManager

DEPTH = 1000
ASKED = 200
LENGTHS = (10, 100, 1000)
KINDS = ("uint32", "int32", "int64", "list")


def mark_runs(blocks: int, run: int, draw: np.random.Generator) -> None:
    """Nanoseconds per block while runs of that length fill an empty tier."""
    managed, seconds = manager(blocks), 0.0
    for _ in range(blocks // run // 10):
        some = list(draw.integers(1, VOCABULARY, size=(10, run * BLOCK), dtype=np.uint32))
        t = perf_counter()
        for tokens in some:
            managed.mark(tokens, "gpu", present=True, now=1)
        seconds += perf_counter() - t
    stored = managed.stats().blocks
    assert stored == blocks // run // 10 * 10 * run
    emit("kvtrie", f"store.{run}", 1e9 * seconds / stored, "ns", blocks=stored, per_call=run)


def find(
    managed: BlockManager, what: str, sequences: list[np.ndarray], blocks: int, calls: int
) -> None:
    """Median microseconds of a lookup, for each kind of sequence."""
    for kind in KINDS:
        chains: list[Any] = [
            tokens.tolist() if kind == "list" else tokens.astype(kind) for tokens in sequences
        ]
        assert all(
            managed.lookup(tokens, now=2, keep=0).tokens == blocks * BLOCK for tokens in chains
        )
        times: list[float] = []
        for i in range(calls):
            tokens = chains[i % len(chains)]
            t = perf_counter()
            managed.lookup(tokens, now=2, keep=0)
            times.append(1e6 * (perf_counter() - t))
        name = what if kind == "uint32" else f"{what}.{kind}"
        p99 = round(percentile(times, 0.99), 2)
        emit("kvtrie", name, percentile(times, 0.5), "us", p99=p99, tokens=len(sequences[0]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=SEED)
    given = parser.parse_args()
    draw = np.random.default_rng(given.seed)
    gc.freeze()
    for run in (16, 100):
        mark_runs(given.blocks, run, draw)
    managed, chains = manager(given.blocks), []
    for c in range(given.blocks // DEPTH):
        chain = draw.integers(1, VOCABULARY, size=DEPTH * BLOCK, dtype=np.uint32)
        managed.mark(chain, "gpu", present=True, now=1)
        if c < ASKED:
            chains.append(chain)
    miss = [draw.integers(1, VOCABULARY, size=10 * BLOCK, dtype=np.uint32) for _ in range(ASKED)]
    find(managed, "find.miss", miss, 0, given.calls)
    for length in LENGTHS:
        prefixes = [chain[: length * BLOCK] for chain in chains]
        find(managed, f"find.{length}", prefixes, length, given.calls)


if __name__ == "__main__":
    main()
