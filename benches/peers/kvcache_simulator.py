"""kvcache-simulator 0.1.3: tokens found in the last half of a trace of block hashes, by LRU.

Its C++ core is compiled at the first use, so a compiler is needed. Prints a line per room, and one
for a cache of all blocks. Needs kvcache-simulator in this interpreter. Cost: seconds.
"""

from __future__ import annotations

import argparse

from kvcache_sim.cpp_backend import run_cpp_sweep
from kvcache_sim.trace import parse_trace_file

from benches.measure import emit

PEER = "kvcache-simulator"


def main() -> None:
    """Play the trace in each room."""
    parser = argparse.ArgumentParser(prog="kvcache_simulator")
    parser.add_argument("trace")
    parser.add_argument("--blocks", type=int, action="append", default=[], help="of a room")
    parser.add_argument("--block-size", type=int, default=512, help="tokens of a block")
    given = parser.parse_args()
    trace = parse_trace_file(given.trace, block_size=given.block_size)
    swept = run_cpp_sweep(
        trace,
        capacities=given.blocks,
        policies=["lru"],
        warmup_requests=trace.request_count // 2,
    )
    for blocks in given.blocks:
        emit(PEER, f"tokens.{blocks}", swept.results["lru", blocks].hitRate, "share")
    emit(PEER, "tokens.all", swept.ceiling.hitRate, "share", blocks=swept.unique_blocks)


if __name__ == "__main__":
    main()
