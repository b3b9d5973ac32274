"""Chats on 1 to 64 machines by router, with and without a shared store: a table and a picture.

    make bench-sim-store

Conversations are generated, in proportion to the machines. Every figure follows from the settings,
so a second run records the same ones. Cost: ten minutes on two cores.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import track

from benches.core.place import place
from benches.core.referee import ROOT
from benches.record import Result, document, keep, options, show
from kvtrie.sim.config import config_of
from kvtrie.sim.sweep import iter_sweep

if TYPE_CHECKING:
    from kvtrie.sim.config import SimulationConfig

OUT = ROOT / "benches/results/sim_store.json"
MACHINES = (1, 4, 16, 64)
ROUTERS = ("round-robin", "hash", "locality", "score")
REQUESTS = 600  # per machine
STORE = 10_000  # blocks per machine


def settings(machines: int, router: str, *, store: bool, requests: int) -> SimulationConfig:
    """An 8B model on A100 with 20 GB of KV on the GPU and on the host, and chats for it."""
    tables: dict[str, Any] = {
        "trace": {
            "format": "sharegpt-like",
            "requests": requests * machines,
            "turns": 10.0,
            "input_tokens": 600.0,
            "think_s": 20.0,
            "arrivals": {"kind": "poisson", "per_s": 0.25 * machines},
        },
        "model": {"layers": 32, "kv_heads": 8, "head_dim": 128, "query_heads": 32},
        "manager": {"block_tokens": 64},
        "engine": {"kind": "continuous"},
        "cost": {"kind": "roofline", "parameters": 8e9, "device": "A100"},
        "machines": machines,
        "router": {"kind": router},
        "directory": {"kind": "events", "delay_ns": 1_000_000},
        "tiers": [{"kind": kind, "blocks": 2500, "write": "through"} for kind in ("gpu", "host")],
    }
    if store:
        lane = {"bytes_per_s": 12.5e9, "latency_ns": 500_000}
        tables["remote"] = {"shared": True, "blocks": STORE * machines, **lane}
    return config_of(tables, Path())


def row_of(machines: int, router: str, store: bool, figures: dict[str, Any]) -> Result:  # noqa: FBT001
    """The share of prompt tokens that is computed, and what is behind it."""
    words = [f"{machines} machine{'s' * (machines > 1)}", router, *["shared store"] * store]
    return Result(
        what=", ".join(words),
        ours=round(figures["computed_tokens"] / figures["input_tokens"], 4),
        unit="of prompt tokens computed",
        more={
            "machines": machines,
            "router": router,
            "store": store,
            "computed": figures["computed_tokens"],
            "prompt": figures["input_tokens"],
            "found": figures["hit_tokens"],
            "ttft_ms": round(figures["ttft_ns"]["mean"] / 1e6, 1),
            "saturated": figures["saturated"],
        },
    )


def main() -> int:
    """Play, report, record."""
    parser = options(__doc__, OUT)
    parser.add_argument("--results", type=Path, help="file of runs that have ended, to go on from")
    given = parser.parse_args()
    most = 4 if given.quick else MACHINES[-1]
    worlds = [
        (machines, router, store)
        for machines in MACHINES
        for router in ROUTERS
        for store in (False, True)
        if machines <= most and (router != ROUTERS[0] or machines in {4, 16})
    ]
    requests = 20 if given.quick else REQUESTS
    configs = [settings(m, router, store=store, requests=requests) for m, router, store in worlds]
    coming = track(
        iter_sweep(configs, results=given.results), "Simulating", len(configs), disable=given.json
    )
    found = dict(coming)
    rows = [row_of(*world, found[at]) for at, world in enumerate(worlds)]
    if not keep(given, document(place(), rows)):
        show(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
