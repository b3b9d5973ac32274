"""Coding agents whose tools report when they will have ended: first tokens after a tool call.

    make bench-sim-progress ARGS="--sessions agentic_sessions.jsonl"

Half an hour of recorded sessions is played at its times: a tool runs from the end of an answer to
the next request of its session. It reports at its start and halfway; the time left that it states
is the true one times a factor whose logarithm has the standard deviation `ERROR`. Every figure
follows from the settings. `--sessions` or KVTRIE_SESSIONS names the file, which is not part of the
project; `--quick` generates chats. Cost: three minutes.
"""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import track

from benches.core.place import place
from benches.core.referee import ROOT
from benches.record import Result, document, keep, options, show
from kvtrie.sim.config import config_of
from kvtrie.sim.requests import trace_requests
from kvtrie.sim.run import run_config
from kvtrie.sim.trace import iter_trace, write_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtrie.sim.config import SimulationConfig

OUT = ROOT / "benches/results/sim_progress.json"
BLOCK = 64
GPU = 14_000  # blocks; the longest prompt takes 12 365
HOSTS = (14_000, 28_000, 42_000, 56_000)
ERROR = 0.5
WINDOW = (45, 75)  # minutes of the recording; in the hour after it one machine is overloaded
PLAYED = (("lru", False), ("lru", True), ("learned", False), ("learned", True))
GOALS = {"lru": 1 / 0.8, "learned": 1 / 0.9}


LANE = {"bytes_per_s": 32e9}


def machine(
    trace: dict[str, Any], policy: str, tiers: Sequence[dict[str, Any]]
) -> SimulationConfig:
    """Qwen3-Coder-30B-A3B on eight B200, with rooms in blocks of 64 tokens."""
    tables: dict[str, Any] = {
        "trace": trace,
        "model": {"layers": 48, "kv_heads": 4, "head_dim": 128, "query_heads": 32, "tp": 8},
        "manager": {"block_tokens": BLOCK, "policy": policy},
        "engine": {"kind": "continuous"},
        "cost": {
            "kind": "roofline",
            "parameters": 30.5e9,
            "active_parameters": 3.3e9,
            "device": "B200",
        },
        "tiers": tiers,
    }
    return config_of(tables, Path())


def settings(
    trace: dict[str, Any], gpu: int, host: int, policy: str, reports: int
) -> SimulationConfig:
    """A machine without a disk, whose tools report."""
    tiers = [
        {"kind": "gpu", "blocks": gpu, "write": "through"},
        {"kind": "host", "blocks": host, "write": "through", "read": LANE, "store": LANE},
    ]
    reporting = {"number": reports, "error": ERROR}
    return machine({**trace, "reports": reporting}, policy, tiers)


def first_tokens(config: SimulationConfig) -> tuple[list[int], dict[str, Any]]:
    """Times to the first token after tool calls in ns, ascending, and the figures of the run."""
    seen: set[str | None] = {None}
    later: list[bool] = []
    for *_, session in trace_requests(config.trace, config.block_tokens):
        later.append(session in seen and session is not None)
        seen.add(session)
    times: list[int] = []

    def on_request(line: dict[str, Any]) -> None:
        if later[line["id"]] and line["first_token_ns"] is not None:
            times.append(line["first_token_ns"] - line["arrival_ns"])

    figures = run_config(config, on_request)
    return sorted(times), figures


def row_of(world: tuple[int, str, bool], times: Sequence[int], figures: dict[str, Any]) -> Result:
    """The 90th percentile of a run, with the figures that explain it."""
    host, policy, reported = world
    # Quantiles are nearest-rank.
    p50, p90, p99 = (
        round(times[-(-share * len(times) // 100) - 1] / 1e9, 3) for share in (50, 90, 99)
    )
    return Result(
        what=f"host {host}, {policy}{', reports' * reported}",
        ours=p90,
        unit="s to the first token, p90 after a tool call",
        more={
            "host": host,
            "policy": policy,
            "reports": reported,
            "p50_s": p50,
            "p99_s": p99,
            "mean_s": round(sum(times) / len(times) / 1e9, 3),
            "computed": round(figures["computed_tokens"] / figures["input_tokens"], 4),
            "found_on_gpu": round(figures["hit_tokens"]["gpu"] / figures["input_tokens"], 4),
            "requests": len(times),
        },
    )


def goals(rows: Sequence[Result]) -> list[Result]:
    """The rows, those of `learned` with reports compared with those that they are to beat."""
    known = {row.what: row for row in rows}
    compared: list[Result] = []
    for row in rows:
        more = row.more
        if more["policy"] != "learned" or not more["reports"] or row.ours is None:
            continue
        for policy, goal in GOALS.items():
            peer = known[f"host {more['host']}, {policy}"].ours or 0.0
            ratio = round(peer / row.ours, 3)
            compared.append(
                Result(
                    f"goal: host {more['host']}, below {policy}",
                    row.ours,
                    row.unit,
                    peer,
                    policy,
                    ratio,
                    round(goal, 3),
                    ratio >= goal,
                )
            )
    return [*rows, *compared]


def played_rows(
    trace: dict[str, Any], gpu: int, hosts: Sequence[int], *, quiet: bool
) -> list[Result]:
    """The rows of all runs, and their goals."""
    worlds = [(host, policy, reported) for host in hosts for policy, reported in PLAYED]
    rows = [
        row_of(world, *first_tokens(settings(trace, gpu, world[0], world[1], 2 * world[2])))
        for world in track(worlds, "Simulating", disable=quiet)
    ]
    return goals(rows)


def window(sessions: Path, folder: Path, minutes: tuple[int, int]) -> Path:
    """Write the part of a recording between two minutes to a folder."""
    first, end = (minute * 60_000_000_000 for minute in minutes)
    played = (
        replace(one, at=one.at - first) for one in iter_trace(sessions) if first <= one.at < end
    )
    path = folder / "sessions.jsonl"
    write_trace(path, played)
    return path


def record(
    about: str | None,
    out: Path,
    hosts: Sequence[int],
    rows_of: Callable[..., list[Result]],
) -> int:
    """Play the recorded half hour for a command, report, and record.

    Args:
        about: the command's docstring.
        out: the record.
        hosts: blocks of host memory.
        rows_of: makes rows of the trace's settings, blocks of the GPU and of host memory.
    """
    parser = options(about, out)
    parser.add_argument("--sessions", default=os.environ.get("KVTRIE_SESSIONS"), metavar="FILE")
    given = parser.parse_args()
    if given.quick:
        trace, gpu, hosts = {"format": "sharegpt-like", "requests": 60}, 100, (100,)
    elif given.sessions is None:
        parser.error("neither --sessions nor KVTRIE_SESSIONS names the sessions")
    else:
        trace, gpu = {"format": "mooncake", "hash_tokens": BLOCK}, GPU
    with tempfile.TemporaryDirectory() as folder:
        if not given.quick:
            trace["path"] = str(window(Path(given.sessions), Path(folder), WINDOW))
        rows = rows_of(trace, gpu, hosts, quiet=given.json)
    if not keep(given, document(place(), rows)):
        show(rows)
    return 0


def main() -> int:
    """Play, report, record."""
    return record(__doc__, OUT, HOSTS, played_rows)


if __name__ == "__main__":
    sys.exit(main())
