"""The table that compares all policies: hits, tokens and cost saved, by trace and room.

    make bench-policies ARGS="--trace mooncake_conversation_trace.jsonl"

The published trace is not part of the project: without it (`--trace` or KVTRIE_TRACE) its rows are
left out. Figures are per cent of all blocks, tokens and cost of the prompts. `belady` is a bound on
hits; the two marked (ref) are good plans made by knowing the future, and nobody's bound. The row
of exact ghosts shows what short fingerprints lose. Where libcachesim is installed its lru, fifo and
lfu serve the same single blocks, and must agree.
Cost: about ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from statistics import fmean

import numpy as np
from policies_exact import exact_retention
from rich.console import Console
from rich.table import Table

from kvtrie import BlockManager, Tier
from kvtrie.cli.progress import watched
from kvtrie.sim.offline import OfflineHits, leaves_first, most_hits
from kvtrie.sim.replay import open_manager, replay
from kvtrie.sim.trace import TraceRequest, read_trace
from kvtrie.sim.workloads import FAMILIES

SHARES = (0.01, 0.03, 0.1, 0.3)
STRUCTURES = ("leaf-only", "holes")
PUBLISHED = "conversation"
PUBLISHED_ROOM = 5859
BOUND = "belady"
EXACT = "retention, exact ghosts"
REFERENCES = {
    "leaf-only": ("belady, leaves (ref)", EXACT),
    "holes": ("belady, blocks (ref)",),
}
FUTURE = [BOUND, *(names[0] for names in REFERENCES.values())]
WIDE = 140
CHECKED = {"lru": "LRU", "fifo": "FIFO", "lfu": "LFU"}


@dataclass(frozen=True, slots=True)
class Job:
    """One cell: a policy, or something to compare it with, on one trace in one room."""

    trace: str
    source: str | None
    requests: int
    room: int
    structure: str
    policy: str


@dataclass(frozen=True, slots=True)
class Cell:
    """What came of a job, in per cent; None where it says nothing."""

    trace: str
    room: int
    structure: str
    policy: str
    hits: float
    tokens: float | None = None
    cost: float | None = None
    check: float | None = None


@cache
def trace_of(name: str, source: str | None, requests: int) -> list[TraceRequest]:
    """The requests of a trace, read or made once per process."""
    return read_trace(Path(source)) if source else FAMILIES[name](requests=requests)


def run(job: Job) -> Cell:
    """Fill one cell."""
    requests = trace_of(job.trace, job.source, job.requests)
    blocks = sum(len(request.blocks) for request in requests)
    head = (job.trace, job.room, job.structure, job.policy)
    if job.policy == BOUND:
        return Cell(*head, 100 * most_hits(requests, job.room).hits / blocks)
    if job.structure == "single blocks":
        return Cell(*head, *singles(job, requests))
    if job.policy in REFERENCES[job.structure]:
        plan = leaves_first if job.structure == "leaf-only" else most_hits
        plan = exact_retention if job.policy == EXACT else plan
        return Cell(*head, *bill(requests, plan(requests, job.room)))
    manager = open_manager(
        [Tier("gpu", blocks=job.room)], policy=job.policy, structure=job.structure
    )
    played = replay(requests, manager)
    assert played.refused == 0
    return Cell(*head, 100 * played.hit_rate, 100 * played.token_rate, 100 * played.cost_rate)


def bill(requests: list[TraceRequest], found: OfflineHits) -> tuple[float, float, float]:
    """Hits, tokens and cost of what an offline plan finds."""
    sums = np.zeros((2, 3))
    for request, mask in zip(requests, map(list, found.blocks), strict=True):
        n = len(request.blocks)
        tokens = np.full(n, 512)
        tokens[-1] -= 512 * n - request.input_tokens
        each = np.stack([np.ones(n), tokens, 512 * (1 + 512 * np.arange(n) / 10_700)])
        sums[0] += each.sum(axis=1)
        sums[1] += each[:, mask].sum(axis=1)
    hits, tokens, cost = (100 * sums[1] / sums[0]).tolist()
    return hits, tokens, cost


def singles(job: Job, requests: list[TraceRequest]) -> tuple[float, None, None, float]:
    """Every block as a request of its own: our hits, and libcachesim's."""
    import libcachesim

    manager = open_manager([Tier("gpu", blocks=job.room)], policy=job.policy)
    theirs = getattr(libcachesim, CHECKED[job.policy])(cache_size=job.room)
    asked = libcachesim.Request()
    asked.obj_size = 1
    stream = np.concatenate([request.blocks for request in requests])
    ours = others = 0
    for now, block in enumerate(stream.reshape(-1, 1)):
        lease = manager.acquire(block, now=now, keep=0)
        ours += lease.matched
        lease.commit(block[lease.matched :], now=now)
        lease.release(now=now)
        asked.obj_id = int(block[0])
        others += theirs.get(asked)
    return 100 * ours / len(stream), None, None, 100 * others / len(stream)


def jobs_of(given: argparse.Namespace) -> list[Job]:
    """All cells that are asked for."""
    sources: dict[str, str | None] = dict.fromkeys(FAMILIES)
    if given.trace:
        sources = {PUBLISHED: str(given.trace), **sources}
    jobs: list[Job] = []
    for name, source in sources.items():
        requests = trace_of(name, source, given.requests)
        distinct = len(np.unique(np.concatenate([request.blocks for request in requests])))
        # A room must hold the longest request: nobody can serve it otherwise.
        longest = max(len(request.blocks) for request in requests)
        rooms = [max(longest, round(share * distinct)) for share in SHARES]
        if source:
            rooms = sorted([*rooms, PUBLISHED_ROOM])
        for room in rooms:
            rows = [("any", BOUND)]
            for structure in STRUCTURES:
                named = [*given.policy, *REFERENCES[structure]]
                rows += [(structure, policy) for policy in named]
            if given.check:
                rows += [("single blocks", policy) for policy in CHECKED]
            jobs += [Job(name, source, given.requests, room, *row) for row in rows]
    return jobs


def verify(cells: list[Cell]) -> list[str]:
    """What must not be: a policy above the bound, or a disagreement."""
    bound = {(cell.trace, cell.room): cell.hits for cell in cells if cell.policy == BOUND}
    wrong: list[str] = []
    for cell in cells:
        if cell.check is not None:
            if round(cell.hits, 2) != round(cell.check, 2):
                wrong.append(f"{cell}: libcachesim finds {cell.check:.4f} %")
        elif cell.hits > bound[cell.trace, cell.room] + 1e-9:
            wrong.append(f"{cell}: above the bound {bound[cell.trace, cell.room]:.4f} %")
    return wrong


def show(cells: list[Cell], console: Console) -> None:
    """Print a table per structure and trace, one of means, and the check."""
    traces = list(dict.fromkeys(cell.trace for cell in cells))
    for structure in STRUCTURES:
        for name in traces:
            mine = [c for c in cells if c.trace == name and c.structure in {structure, "any"}]
            rooms = list(dict.fromkeys(cell.room for cell in mine))
            table = Table(title=f"{name}, {structure}: hits / tokens / cost saved, per cent")
            table.add_column("policy")
            for room in rooms:
                table.add_column(f"{room} blocks", justify="right")
            for policy in ranked(mine):
                row = {cell.room: cell for cell in mine if cell.policy == policy}
                table.add_row(policy, *(figures(row[room]) for room in rooms))
            console.print(table)
        table = Table(title=f"{structure}: means over all rooms and traces, per cent")
        for head in ("policy", "hits", "tokens", "cost saved"):
            table.add_column(head, justify="left" if head == "policy" else "right")
        mine = [cell for cell in cells if cell.structure in {structure, "any"}]
        for policy in ranked(mine):
            row = [cell for cell in mine if cell.policy == policy]
            table.add_row(policy, *(mean(row, name) for name in ("hits", "tokens", "cost")))
        console.print(table)
    checked = [cell for cell in cells if cell.check is not None]
    if checked:
        table = Table(title="every block a request of its own: hits, per cent")
        for head in ("trace", "blocks", "policy", "kvtrie", "libcachesim"):
            table.add_column(head, justify="right" if head not in {"trace", "policy"} else "left")
        for cell in checked:
            pair = (f"{cell.hits:.4f}", f"{cell.check:.4f}")
            table.add_row(cell.trace, str(cell.room), cell.policy, *pair)
        console.print(table)


def ranked(cells: list[Cell]) -> list[str]:
    """Policies by the mean cost that they save, those that know the future last."""
    names = list(dict.fromkeys(cell.policy for cell in cells))

    def key(name: str) -> tuple[int, float]:
        costs = [cell.cost or 0.0 for cell in cells if cell.policy == name]
        return (FUTURE.index(name) + 1 if name in FUTURE else 0, fmean(costs))

    return sorted(names, key=key)


def figures(cell: Cell) -> str:
    """The three figures of a cell."""
    parts = (cell.hits, cell.tokens, cell.cost)
    return " ".join("   –" if part is None else f"{part:4.1f}" for part in parts)


def mean(cells: list[Cell], name: str) -> str:
    """The mean of one figure."""
    values = [getattr(cell, name) for cell in cells]
    return "–" if None in values else f"{fmean(values):.1f}"


def main() -> int:
    """Run all jobs and print what came of them; 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--trace",
        type=Path,
        default=os.environ.get("KVTRIE_TRACE"),
        help="the Mooncake conversation trace",
    )
    parser.add_argument("--policy", action="append", choices=BlockManager.policies())
    parser.add_argument("--requests", type=int, default=10_000, help="of a made-up trace")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    given = parser.parse_args()
    given.policy = given.policy or BlockManager.policies()
    told = Console(stderr=True)
    if not given.trace:
        told.print("No --trace and no KVTRIE_TRACE: the rows of the published trace are left out.")
    try:
        import libcachesim  # noqa: F401 - the workers need it

        given.check = True
    except ImportError:
        given.check = False
        told.print("libcachesim is not installed: the independent check is left out.")
    jobs = jobs_of(given)
    with ProcessPoolExecutor(given.workers) as pool:
        running = [pool.submit(run, job) for job in jobs]
        cells = [job.result() for job in watched(running, "Replaying", quiet=given.json)]
    wrong = verify(cells)
    if given.json:
        print(json.dumps({"cells": [asdict(cell) for cell in cells], "wrong": wrong}))
    else:
        show(cells, Console(width=None if sys.stdout.isatty() else WIDE))
    for line in wrong:
        told.print(line)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
