"""Dynamo 1.6.1: `dynamo.llm.RadixTree`, the index of a KV router.

Each of 64 workers stores chains of 1000 blocks, a million blocks together; the events' JSON is made
before the clock starts. Then prefixes of stored chains are looked up, as lists of ready hashes.
Each call hops to the tree's thread, so both are pinned to one core: on two cores of an idle machine
each call would wait for a sleeping one. Needs ai-dynamo-runtime in this interpreter.
Cost: a minute.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from time import perf_counter
from typing import TYPE_CHECKING

from dynamo.llm import RadixTree

from benches.measure import emit, percentile, resident_bytes
from benches.workload import SEED

if TYPE_CHECKING:
    from collections.abc import Iterator

PEER = "Dynamo"
WORKERS = 64
DEPTH = 1000
ASKED = 200  # chains whose prefixes are looked up
LENGTHS = (10, 100, 1000)
CALLS = 2000


def stored_events(chain: list[tuple[int, int]], per_call: int) -> Iterator[bytes]:
    """The events, in the tree's JSON, that store one chain, `per_call` blocks in each."""
    for i in range(0, DEPTH, per_call):
        blocks = [
            {"block_hash": block, "tokens_hash": tokens}
            for block, tokens in chain[i : i + per_call]
        ]
        stored = {"parent_hash": chain[i - 1][0] if i else None, "blocks": blocks}
        event = {"event_id": i, "data": {"stored": stored}, "dp_rank": 0}
        yield json.dumps(event, separators=(",", ":")).encode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--per-call", type=int, default=16)
    parser.add_argument("--unpinned", action="store_true", help="caller and tree on two cores")
    parser.add_argument("--seed", type=int, default=SEED)
    given = parser.parse_args()
    if not given.unpinned:  # before the tree starts its thread
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    draw = random.Random(given.seed)

    def new_chain() -> list[tuple[int, int]]:
        return [(draw.getrandbits(63), draw.getrandbits(63)) for _ in range(DEPTH)]

    tree, queried = RadixTree(), [new_chain() for _ in range(ASKED)]
    tree.find_matches([1])  # starts the thread
    before, seconds, chains = resident_bytes(), 0.0, given.blocks // DEPTH
    for c in range(chains):
        events = list(stored_events(queried[c] if c < ASKED else new_chain(), given.per_call))
        t = perf_counter()
        for event in events:
            tree.apply_event(c % WORKERS, event)
        seconds += perf_counter() - t
    blocks = chains * DEPTH
    context = {"blocks": blocks, "workers": WORKERS, "per_call": given.per_call}
    context["pinned"] = not given.unpinned
    grown = (resident_bytes() - before) / blocks
    emit(PEER, f"store.{given.per_call}", 1e9 * seconds / blocks, "ns", **context)
    emit(PEER, "memory", grown, "B", **context)

    def find(what: str, sequences: list[list[int]]) -> None:
        times: list[float] = []
        for i in range(CALLS):
            sequence = sequences[i % len(sequences)]
            t = perf_counter()
            tree.find_matches(sequence)
            times.append(1e6 * (perf_counter() - t))
        p99 = round(percentile(times, 0.99), 1)
        emit(PEER, f"find.{what}", percentile(times, 0.5), "us", p99=p99, **context)

    find("miss", [[draw.getrandbits(63) for _ in range(10)] for _ in range(ASKED)])
    for length in LENGTHS:
        prefixes = [[tokens for _, tokens in chain[:length]] for chain in queried[:chains]]
        assert list(tree.find_matches(prefixes[0]).scores.values()) == [length]
        find(str(length), prefixes)


if __name__ == "__main__":
    main()
