"""Dynamo 1.6.1's mocker, replayed offline: processor seconds from the file to the report.

The same trace, rooms and machines as `benches.ours.simulation`; its own step times, and its KV
router where there are several workers. Needs ai-dynamo-runtime in this interpreter. Cost: a
minute.
"""

from __future__ import annotations

import argparse
import os
from time import process_time
from typing import Any

os.environ.setdefault("DYN_LOG", "error")

from dynamo import _core

from benches.measure import emit

PEER = "Dynamo"
BLOCK = 512
GPU, HOST = 5859, 40_000
KV_BYTES = 2 * 32 * 8 * 128 * 2  # of a token
GB_PER_S = 25.0
OFFLOAD = {
    "native_host_offload": {
        "num_host_blocks": HOST,
        "h2d_bandwidth_gbps": GB_PER_S,
        "d2h_bandwidth_gbps": GB_PER_S,
    },
    "kv_cache_bytes_per_token": KV_BYTES,
}
ROUTED = {"router_mode": "kv_router"}
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one_tier": ({}, {}),
    "host_tier": (OFFLOAD, {}),
    "4_machines": ({}, {"num_workers": 4, **ROUTED}),
    "16_machines": ({}, {"num_workers": 16, **ROUTED}),
}


def main() -> None:
    """Play the trace on each set of workers."""
    parser = argparse.ArgumentParser(prog="dynamo_replay")
    parser.add_argument("trace")
    given = parser.parse_args()
    for name, (engine, replay) in RUNS.items():
        settings = {"engine": {"block_size": BLOCK, "num_gpu_blocks": GPU, **engine}}
        config = _core._normalize_mocker_config(settings)  # noqa: SLF001 - its CLI does the same
        start = process_time()
        done = _core.run_mocker_trace_replay(
            [given.trace], extra_engine_args=config, trace_block_size=BLOCK, **replay
        )
        seconds = process_time() - start
        summary = dict(done.summary)
        found = round(summary["prefix_cache_reused_ratio"], 4)
        more = {"requests": summary["completed_requests"]}
        more["ends_s"] = round(summary["duration_ms"] / 1e3)
        emit(PEER, name, seconds, "s", found=found, **more)


if __name__ == "__main__":
    main()
