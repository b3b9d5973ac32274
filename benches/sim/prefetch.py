"""Coding agents that declare when a tool ends: host memory that prefetched blocks hold until then.

    make bench-sim-prefetch ARGS="--sessions agentic_sessions.jsonl"

The half hour of `bench-sim-progress`, with a disk below the host. While a tool runs, the blocks of
its session are on disk (`Demote`); they are to be in host memory when the tool ends, a time that it
declares at its start and halfway. Three hints bring them: `Prefetch` halfway, at once; `Progress`,
which ends an eighth of the pause early; and `Prefetch` with the end as its deadline, which begins
as late as the lanes allow. A block counts from its arrival in host memory to its first use. Every
figure follows from the settings. `--sessions` or KVTRIE_SESSIONS names the file, which is not part
of the project; `--quick` generates chats. Cost: two minutes.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from rich.progress import track

from benches.core.referee import ROOT
from benches.record import Result
from benches.sim.progress import LANE, first_tokens, machine, record

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtrie.sim.config import SimulationConfig

OUT = ROOT / "benches/results/sim_prefetch.json"
HOSTS = (14_000, 28_000)
DISK = 400_000  # blocks, more than the recording has
DISK_LANE = {"bytes_per_s": 12e9}
HINTS = ("prefetch-now", "progress", "prefetch")
GOAL = 2.0  # at most half of the byte-seconds
SAME = 1.02  # 95th percentiles that count as equal


def settings(trace: dict[str, Any], gpu: int, host: int, hint: str) -> SimulationConfig:
    """A machine with a disk, to which a session goes while its tool runs."""
    tiers = [
        {"kind": "gpu", "blocks": gpu, "write": "through"},
        {"kind": "host", "blocks": host, "write": "through", "read": LANE, "store": LANE},
        {"kind": "disk", "blocks": DISK, "read": DISK_LANE, "store": DISK_LANE},
    ]
    reports = {"number": 2, "error": 0, "hint": hint, "tier": "host", "demote": True}
    return machine({**trace, "reports": reports}, "learned", tiers)


def row_of(host: int, hint: str, times: Sequence[int], figures: dict[str, Any]) -> Result:
    """The byte-seconds of a run, with its times to the first token."""
    # Quantiles are nearest-rank.
    p50, p95 = (round(times[-(-share * len(times) // 100) - 1] / 1e9, 4) for share in (50, 95))
    return Result(
        what=f"host {host}, {hint}",
        ours=figures["tiers"][1]["prefetched_byte_s"] / 1e9,
        unit="GB·s of prefetched blocks in host memory before their first use",
        more={
            "host": host,
            "hint": hint,
            "p50_s": p50,
            "p95_s": p95,
            "mean_s": round(sum(times) / len(times) / 1e9, 4),
            "found_on_host": round(figures["hit_tokens"]["host"] / figures["input_tokens"], 4),
            "requests": len(times),
        },
    )


def goals(rows: Sequence[Result]) -> list[Result]:
    """The rows, late prefetches compared with both others: half, at an equal 95th percentile."""
    known = {row.what: row for row in rows}
    compared: list[Result] = []
    for row in rows:
        more = row.more
        if more["hint"] != "prefetch" or not row.ours:
            continue
        for hint in HINTS[:-1]:
            other = known[f"host {more['host']}, {hint}"]
            peer = other.ours or 0.0
            ratio = round(peer / row.ours, 3)
            same = more["p95_s"] <= SAME * other.more["p95_s"]
            compared.append(
                Result(
                    f"goal: host {more['host']}, below {hint}",
                    row.ours,
                    row.unit,
                    peer,
                    hint,
                    ratio,
                    GOAL,
                    ratio >= GOAL and same,
                )
            )
    return [*rows, *compared]


def played_rows(
    trace: dict[str, Any], gpu: int, hosts: Sequence[int], *, quiet: bool
) -> list[Result]:
    """The rows of all runs, and their goals."""
    worlds = [(host, hint) for host in hosts for hint in HINTS]
    return goals(
        [
            row_of(host, hint, *first_tokens(settings(trace, gpu, host, hint)))
            for host, hint in track(worlds, "Simulating", disable=quiet)
        ]
    )


def main() -> int:
    """Play, report, record."""
    return record(__doc__, OUT, HOSTS, played_rows)


if __name__ == "__main__":
    sys.exit(main())
