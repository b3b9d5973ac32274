"""The table that compares policies: cost saved and hits, by trace, room and mode, with goals.

    make bench-policies ARGS="--trace FILE --sessions FILE"

The two files are not part of the project: without them (or KVTRIE_TRACE and KVTRIE_SESSIONS) their
rows are left out. Figures are per cent of all prompts. `belady` is a bound on hits; those marked
(ref) are good plans made by knowing the future, and no bound. Where libcachesim is installed its
lru, fifo and lfu serve the same single blocks, and must agree; its ARC, S3-FIFO, LIRS and GDSF
serve them too, for comparison. The mode `engine` is a host tier below an engine that evicts its own
tier by lru and stores every block; the mode `short` plays single blocks (`short.py`). Then come the
shares of lru's room in which the default policy is as good (`equal.py`), online policies that
kvtrie does not have (`online.py`), whose constants the first halves of the traces choose and the
second ones show (`finds.py`), and first-token times in the simulator (`waits.py`), all of seed 0.
The first seeds of all modes are played first. A record is written every minute; `--resume` plays
what it lacks. Cost: two hours on one core, a seed of it half an hour after the first.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from rich.console import Console

from benches import tables
from benches.evaluation import Cell, Runner
from benches.pages import write_part
from benches.policies import short
from benches.policies.asked import online_cells
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
)
from benches.policies.equal import Share, questions, share_of
from benches.policies.finds import CHOSEN, best_constants
from benches.policies.goals import goals_of
from benches.policies.show import show
from benches.policies.traces import AGENTS, COMMON, SEEDS, Source, engine_room, rooms_of, sources
from benches.policies.waits import Wait
from benches.record import options
from kvtrie import BlockManager

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable, Iterator

    from benches.evaluation import Key

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
    """Find errors: a policy above the bound, two implementations that disagree, other constants."""
    bound = {(r.trace, r.seed, r.room): r.hits for r in rows if r.policy == BOUND}
    best = best_constants(rows)
    wrong = [
        f"{policy}: the first halves choose {best[policy]:g}, not {constant:g}"
        for policy, constant in CHOSEN.items()
        if best.get(policy, constant) != constant
    ]
    for row in rows:
        most = bound.get((row.trace, row.seed, row.room), 100.0)
        if row.check is not None:
            if row.policy in CHECKED and round(row.hits, 2) != round(row.check, 2):
                wrong.append(f"{row}: libcachesim finds {row.check:.4f} %")
        elif row.tiers == 1 and row.hits > most + 1e-9:
            wrong.append(f"{row}: above the bound {most:.4f} %")
    return wrong


def text_of(rows: list[Row], shares: list[Share], times: list[Wait]) -> str:
    """The record: date, goals, shares of rooms, first-token times, rows; a line each."""
    goals = [{**asdict(goal), "ok": goal.ok} for goal in goals_of(rows, shares, times)]
    parts = {"goals": goals, "shares": map(asdict, shares), "waits": map(asdict, times)}
    parts["rows"] = map(asdict, rows)
    text = f'{{"date": "{datetime.now(UTC).date().isoformat()}"'
    for name, lines in parts.items():
        text += f', "{name}": [\n' + ",\n".join(map(json.dumps, lines)) + "\n]"
    return text + "}\n"


def keep(path: Path, rows: list[Row], shares: list[Share], times: list[Wait]) -> None:
    """Write the record and, if it is the project's, its tables in the documentation."""
    new = path.with_suffix(".new")
    new.write_text(text_of(rows, shares, times))
    new.replace(path)
    if path == RESULTS:
        write_part(tables.page("policies"), "policies", tables.rendered("policies"))


class Table(Runner["Row | Share | Wait"]):
    """All cells, and the record, which is written every minute.

    Args:
        jobs: rows, in the record's order.
        asked: shares.
        online: halves of traces, and first-token times.
        path: of the record; None writes none.
        console: for progress.
    """

    def __init__(
        self,
        jobs: Iterable[Job],
        asked: Iterable[Job],
        online: Iterable[Cell],
        path: Path | None,
        console: Console,
    ) -> None:
        super().__init__()
        cells = [Cell([job.key], partial(_one, play, job)) for job in jobs]
        cells += [Cell([job.key[:-1]], partial(_one, share_of, job)) for job in asked]
        cells += online
        self.cells = list({cell.keys[0]: cell for cell in cells}.values())
        self.path, self.console = path, console
        self.count = self.left = 0
        self.begun = self.written = perf_counter()

    def resume(self) -> None:
        """Read what the record has."""
        if self.path is not None and self.path.exists():
            record = json.loads(self.path.read_text())
            for row in record["rows"]:
                super().append(Row(**row))
            for share in record["shares"]:
                super().append(Share(**share))
            for wait in record.get("waits", ()):
                super().append(Wait(**wait))

    def play(self, workers: int) -> None:
        """Play the cells that have no row, seed by seed."""
        self.left = sum(cell.keys[0] not in self.by_key for cell in self.cells)
        first = sorted(self.cells, key=lambda cell: cell.keys[0][1])
        self.complete("Playing", first, quiet=True, workers=workers)
        self.keep()

    def append(self, record: Row | Share | Wait) -> None:
        """Keep a figure, and write the record once a minute."""
        super().append(record)
        self.count += 1
        if perf_counter() - self.written > EVERY_S:
            self.keep()

    def keep(self) -> None:
        """Write the record, if it has a file, and say how far it is."""
        self.written = perf_counter()
        self.console.print(f"{self.count}/{self.left}, {self.written - self.begun:.0f} s")
        if self.path is not None:
            keep(self.path, *self.found())

    def found(self) -> tuple[list[Row], list[Share], list[Wait]]:
        """Rows, shares and times of the cells that are measured."""
        keys = [key for cell in self.cells for key in cell.keys]
        known = [self.by_key[key] for key in keys if key in self.by_key]
        return (
            [one for one in known if isinstance(one, Row)],
            [one for one in known if isinstance(one, Share)],
            [one for one in known if isinstance(one, Wait)],
        )


def _one(call: Callable[[Job], Row | Share], job: Job, _: list[Key]) -> list[Row | Share]:
    return [call(job)]


def main() -> int:
    """Play all cells and print what came of them; 1 if something is wrong."""
    parser = options(__doc__, RESULTS)
    parser.add_argument(
        "--trace", default=os.environ.get("KVTRIE_TRACE"), help="the Mooncake conversation trace"
    )
    parser.add_argument(
        "--sessions", default=os.environ.get("KVTRIE_SESSIONS"), help="sessions of coding agents"
    )
    parser.add_argument("--policy", action="append", choices=BlockManager.policies())
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
    jobs = [job for mode in MODES[: given.modes] for job in jobs_of(given, *mode)]
    played = sources(given.trace, given.sessions, given.seeds, given.requests)
    asked = [] if given.quick else [job for source in played for job in questions(source)]
    first = [] if given.quick else [source for source in played if source.seed == 0]
    online = [cell for source in first for cell in online_cells(source, check=given.check)]
    made = Table(jobs, asked, online, path, console)
    if given.resume:
        made.resume()
    made.play(given.workers)
    rows, shares, times = made.found()
    if given.json:
        sys.stdout.write(text_of(rows, shares, times))
    else:
        show(rows, shares, times, Console(width=None if sys.stdout.isatty() else WIDE))
    wrong = verify(rows)
    for line in wrong:
        console.print(line)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
