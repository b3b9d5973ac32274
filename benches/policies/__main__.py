"""The table that compares policies: cost saved and hits, by trace, room and mode, with goals.

    make bench-policies ARGS="--trace FILE --sessions FILE"

The two files are not part of the project: without them (or KVTRIE_TRACE and KVTRIE_SESSIONS) their
rows are left out. Figures are per cent of all prompts. `belady` is a bound on hits; those marked
(ref) are good plans made by knowing the future, and no bound. `--exact` shows what short
fingerprints lose. Where libcachesim is installed its lru, fifo and lfu serve the same single
blocks, and must agree; its ARC, S3-FIFO, LIRS and GDSF serve them too, for comparison. The mode
`engine` is a host tier below an engine that evicts its own tier by lru and stores every block; the
mode `short` plays single blocks (`short.py`).
Rows are written as they come, the leaf-only ones of one tier first.
Cost: an hour on two cores; `--seeds 1 --modes 1` takes a quarter of one.
"""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from rich.console import Console

from benches.policies import short
from benches.policies.cells import (
    BALANCED,
    BASELINES,
    BELOW_ENGINE,
    BLOCKS,
    BOUND,
    CHECKED,
    ENDS,
    ENGINE,
    EXACT,
    HITS,
    LEAVES,
    SHORT,
    Job,
    Row,
    play,
    policies,
)
from benches.policies.goals import goals_of
from benches.policies.show import show
from benches.policies.traces import AGENTS, COMMON, SEEDS, Source, engine_room, rooms_of, sources
from benches.record import options

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

RESULTS = Path(__file__).parents[1] / "results" / "policies.json"
COMPARED = ("learned", "lru", "flat", "retention")
MODES = (
    ("leaf-only", 1),
    (ENGINE, 2),
    (SHORT, 1),
    ("holes", 1),
    ("leaf-only", 2),
    ("holes", 2),
)
WIDE = 150


def jobs_of(given: argparse.Namespace, structure: str, tiers: int) -> Iterator[Job]:
    """All cells of one mode."""
    if structure == SHORT:
        return _short_jobs(given)
    if structure == ENGINE:
        return _engine_jobs(given)
    return _store_jobs(given, structure, tiers)


def _store_jobs(given: argparse.Namespace, structure: str, tiers: int) -> Iterator[Job]:
    """One or two tiers of ours, in rooms that are shares of the trace's blocks."""
    main = (structure, tiers) == MODES[0]
    for source in sources(given.trace, given.sessions, given.seeds, given.requests):
        sessions = source.name in {AGENTS, COMMON}
        for room in rooms_of(source):
            rows = list(given.policy)
            if main and "learned" in rows:
                rows += ["learned" + BALANCED, "learned" + HITS]
            if main and sessions:
                rows += [policy + ENDS for policy in ("learned", "flat", "lru") if policy in rows]
            if tiers == 1:
                rows.append(LEAVES if structure == "leaf-only" else BLOCKS)
            # The rows below compare ghosts and the other implementation, so one trace suffices.
            if main and source.seed == 0 and not sessions:
                rows += [BOUND, *([EXACT] if given.exact else [])]
            for row in rows:
                yield Job(source, room, structure, tiers, row)
            if main and given.check and source.seed == 0 and not sessions:
                for policy in (*CHECKED, *BASELINES):
                    yield Job(source, room, "single blocks", 1, policy)


def _engine_jobs(given: argparse.Namespace) -> Iterator[Job]:
    """A host tier below an engine's own lru, in rooms that are multiples of the engine's."""
    rows = [*given.policy, *(["learned" + BALANCED] if "learned" in given.policy else [])]
    for source in sources(given.trace, given.sessions, given.seeds, given.requests):
        for factor in BELOW_ENGINE:
            room = factor * engine_room(source)
            for row in rows:
                yield Job(source, room, ENGINE, 2, row)


def _short_jobs(given: argparse.Namespace) -> Iterator[Job]:
    """Single blocks; of the peers as well where libcachesim is installed."""
    rows = [*given.policy, *(short.PEERS if given.check else ())]
    for name in short.STREAMS:
        for seed in range(given.seeds):
            for room in short.ROOMS:
                for row in rows:
                    yield Job(Source(name, None, seed, 0), room, SHORT, 1, row)


def verify(rows: list[Row]) -> list[str]:
    """Find errors: a policy above the bound, or two implementations that disagree."""
    bound = {(r.trace, r.seed, r.room): r.hits for r in rows if r.policy == BOUND}
    wrong: list[str] = []
    for row in rows:
        most = bound.get((row.trace, row.seed, row.room), 100.0)
        if row.check is not None:
            if row.policy in CHECKED and round(row.hits, 2) != round(row.check, 2):
                wrong.append(f"{row}: libcachesim finds {row.check:.4f} %")
        elif row.tiers == 1 and row.hits > most + 1e-9:
            wrong.append(f"{row}: above the bound {most:.4f} %")
    return wrong


def text_of(rows: list[Row]) -> str:
    """The record: the rows, a line each, and the goals that they reach or miss."""
    goals = [{**asdict(goal), "ok": goal.ok} for goal in goals_of(rows)]
    lines = ",\n".join(json.dumps(asdict(row)) for row in rows)
    goal_lines = ",\n".join(json.dumps(goal) for goal in goals)
    return f'{{"goals": [\n{goal_lines}\n], "rows": [\n{lines}\n]}}\n'


def main() -> int:
    """Play all cells and print what came of them; 1 if something is wrong."""
    parser = options(__doc__, RESULTS)
    parser.add_argument(
        "--trace", default=os.environ.get("KVTRIE_TRACE"), help="the Mooncake conversation trace"
    )
    parser.add_argument(
        "--sessions", default=os.environ.get("KVTRIE_SESSIONS"), help="sessions of coding agents"
    )
    parser.add_argument("--policy", action="append", choices=policies())
    parser.add_argument("--requests", type=int, help="of a made-up trace (default: 10 000)")
    parser.add_argument("--seeds", type=int, choices=range(1, SEEDS + 1))
    parser.add_argument("--modes", type=int, help="the number of them, leaf-only first")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--exact", action="store_true", help="also exact ghosts, which is slow")
    given = parser.parse_args()
    given.requests = given.requests or (60 if given.quick else 10_000)
    given.seeds = given.seeds or (1 if given.quick else SEEDS)
    given.modes = given.modes or (1 if given.quick else len(MODES))
    path = given.out or (None if given.quick else given.default_out)
    given.policy = given.policy or list(COMPARED)
    console = Console(stderr=True)
    for name in ("trace", "sessions"):
        if not getattr(given, name):
            console.print(f"No --{name} and no KVTRIE_{name.upper()}: its rows are left out.")
    given.check = find_spec("libcachesim") is not None
    if not given.check:
        console.print("libcachesim is not installed: the independent check is left out.")
    rows: list[Row] = []
    with ProcessPoolExecutor(given.workers) as pool:
        for structure, tiers in MODES[: given.modes]:
            jobs = list(jobs_of(given, structure, tiers))
            begun, running = perf_counter(), {pool.submit(play, job): job for job in jobs}
            done: dict[Job, Row] = {}
            for one in as_completed(running):
                done[running[one]] = one.result()
                if len(done) % 20 == 0 or len(done) == len(jobs):
                    seconds = perf_counter() - begun
                    console.print(
                        f"{structure}, tiers {tiers}: {len(done)}/{len(jobs)}, {seconds:.0f} s"
                    )
            rows += [done[job] for job in jobs]
            if path is not None:
                path.write_text(text_of(rows))
    if given.json:
        sys.stdout.write(text_of(rows))
    else:
        show(rows, Console(width=None if sys.stdout.isatty() else WIDE))
    wrong = verify(rows)
    for line in wrong:
        console.print(line)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
