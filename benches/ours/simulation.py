"""The simulator on a trace of block hashes: processor seconds from the file to the figures.

Prints a line per set of machines: one tier, a host below it, four and sixteen machines routed to
where most of a prompt is found. Engines batch; a token takes 20 microseconds, so that
one machine keeps up with the trace. Cost: half a minute.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from time import process_time
from typing import Any

from benches.measure import emit
from kvtrie.sim.config import config_of
from kvtrie.sim.run import run_config

PEER = "kvtrie"
GPU, HOST = 5859, 40_000
LANE = {"bytes_per_s": 25_000_000_000, "latency_ns": 10_000}
TIER = {"kind": "gpu", "blocks": GPU}
BELOW = {"kind": "host", "blocks": HOST, "read": LANE, "store": LANE}
RUNS: dict[str, tuple[int, list[dict[str, Any]]]] = {
    "one_tier": (1, [TIER]),
    "host_tier": (1, [TIER, BELOW]),
    "4_machines": (4, [TIER]),
    "16_machines": (16, [TIER]),
}


def main() -> None:
    """Play the trace on each set of machines."""
    parser = argparse.ArgumentParser(prog="simulation")
    parser.add_argument("trace", type=Path)
    given = parser.parse_args()
    for name, (machines, tiers) in RUNS.items():
        document = {
            "trace": {"path": str(given.trace.absolute()), "format": "mooncake"},
            "machines": machines,
            "model": {
                "layers": 32,
                "kv_heads": 8,
                "head_dim": 128,
                "dtype": "bfloat16",
                "query_heads": 32,
                "hidden": 4096,
            },
            "engine": {"kind": "continuous", "token_budget": 8192, "max_running": 256},
            "cost": {"kind": "affine", "ns_per_token": 20_000, "alpha": 0},
            "router": {"kind": "locality"},
            "tiers": tiers,
        }
        config = config_of(document, Path())
        start = process_time()
        figures = run_config(config)
        seconds = process_time() - start
        found = sum(figures["hit_tokens"].values()) / figures["input_tokens"]
        more = {"requests": figures["requests"], "ends_s": round(figures["end_ns"] / 1e9)}
        emit(PEER, name, seconds, "s", found=round(found, 4), **more)


if __name__ == "__main__":
    main()
