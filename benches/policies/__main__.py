"""The table that compares policies: cost saved and hits, by trace, room and mode, with goals.

    make bench-policies ARGS="--trace FILE --sessions FILE"

The two files are not part of the project: without them (or KVTRIE_TRACE and KVTRIE_SESSIONS) their
rows are left out. Figures are per cent of all prompts. `belady` is a bound on hits; those marked
(ref) are good plans made by knowing the future, and no bound. Where libcachesim is installed its
lru, fifo and lfu serve the same single blocks, and must agree; its ARC, S3-FIFO, LIRS and GDSF
serve them too, for comparison. The mode `engine` is a host tier below an engine that evicts its own
tier by lru and stores every block; the mode `short` plays single blocks (`short.py`). Last come the
shares of lru's room in which the default policy is as good (`equal.py`).
The first seeds of all modes are played first. A record is written every minute; `--resume` plays
what it lacks. Cost: two hours on one core, a seed of it half an hour after the first.
"""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, astuple
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from rich.console import Console

from benches import tables
from benches.pages import write_part
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
    HITS,
    LEAVES,
    SHORT,
    Job,
    Row,
    play,
    policies,
)
from benches.policies.equal import Equal, Share, questions, share_of
from benches.policies.goals import goals_of
from benches.policies.show import show
from benches.policies.traces import AGENTS, COMMON, SEEDS, Source, engine_room, rooms_of, sources
from benches.record import options

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

RESULTS = Path(__file__).parents[1] / "results" / "policies.json"
Key = tuple[str | int, ...]
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
EVERY_S = 60


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
            # The rows below compare implementations, so one trace suffices.
            if main and source.seed == 0 and not sessions:
                rows.append(BOUND)
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


def text_of(rows: list[Row], shares: list[Share]) -> str:
    """The record: date, goals that are reached or missed, shares of rooms, rows; a line each."""
    goals = [{**asdict(goal), "ok": goal.ok} for goal in goals_of(rows, shares)]
    parts = {"goals": goals, "shares": map(asdict, shares), "rows": map(asdict, rows)}
    text = f'{{"date": "{datetime.now(UTC).date().isoformat()}"'
    for name, lines in parts.items():
        text += f', "{name}": [\n' + ",\n".join(map(json.dumps, lines)) + "\n]"
    return text + "}\n"


def keep(path: Path, rows: list[Row], shares: list[Share]) -> None:
    """Write the record and, if it is the project's, its tables in the documentation."""
    new = path.with_suffix(".new")
    new.write_text(text_of(rows, shares))
    new.replace(path)
    if path == RESULTS:
        write_part(tables.page("policies"), "policies", tables.rendered("policies"))


def before(path: Path | None) -> dict[Key, Row | Share]:
    """What a record already has, by the key of its job."""
    if path is None or not path.exists():
        return {}
    record = json.loads(path.read_text())
    found: list[Row | Share] = [Row(**row) for row in record["rows"]]
    found += [Share(**share) for share in record["shares"]]
    return {key_of(one): one for one in found}


def key_of(one: Job | Equal | Row | Share) -> Key:
    """Trace, seed, room, structure, tiers, and the policy of a cell."""
    if isinstance(one, Equal):
        one = one.lru
        return (one.source.name, one.source.seed, one.room, one.structure, one.tiers)
    if isinstance(one, Job):
        source = one.source
        return (source.name, source.seed, one.room, one.structure, one.tiers, one.policy)
    return astuple(one)[: 6 if isinstance(one, Row) else 5]


def answer(asked: Job | Equal) -> Row | Share:
    """Play a cell, or find a share."""
    return share_of(asked) if isinstance(asked, Equal) else play(asked)


def _all(
    jobs: list[Job | Equal], path: Path | None, console: Console, *, workers: int, resume: bool
) -> tuple[list[Row], list[Share]]:
    """Play the jobs, seed by seed, and write the record as they come."""
    done = before(path) if resume else {}
    order = {key_of(job): job for job in jobs}
    left = sorted((key for key in order if key not in done), key=lambda key: key[1])

    def found() -> tuple[list[Row], list[Share]]:
        known = [done[key] for key in order if key in done]
        return (
            [one for one in known if isinstance(one, Row)],
            [one for one in known if isinstance(one, Share)],
        )

    begun = written = perf_counter()
    with ProcessPoolExecutor(workers) as pool:
        running = {pool.submit(answer, order[key]): key for key in left}
        for count, one in enumerate(as_completed(running), 1):
            done[running[one]] = one.result()
            now = perf_counter()
            if now - written > EVERY_S or count == len(left):
                console.print(f"{count}/{len(left)}, {now - begun:.0f} s")
                written = now
                if path is not None:
                    keep(path, *found())
    if path is not None:
        keep(path, *found())
    return found()


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
    parser.add_argument("--resume", action="store_true", help="play what the record lacks")
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
    jobs: list[Job | Equal] = []
    for structure, tiers in MODES[: given.modes]:
        jobs += jobs_of(given, structure, tiers)
    if not given.quick:
        played = sources(given.trace, given.sessions, given.seeds, given.requests)
        jobs += [asked for source in played for asked in questions(source)]
    rows, shares = _all(jobs, path, console, workers=given.workers, resume=given.resume)
    if given.json:
        sys.stdout.write(text_of(rows, shares))
    else:
        show(rows, shares, Console(width=None if sys.stdout.isatty() else WIDE))
    wrong = verify(rows)
    for line in wrong:
        console.print(line)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
