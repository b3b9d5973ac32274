"""The fault campaign: devices that fail in every way we know, under random conversations.

First an engine without a model over memory, storages and files that fail, through the executor: it
compares every byte that a plan calls reused (`tests/transfer/verifying_engine.py`), until each kind
has had the wanted number of faults. Of the kinds with kept memory each engine's host tier is a file
that the next engine finds. Then the disk tier's own campaigns, in Rust, each with this
number of cases: stores of each kind below its files, faults of each kind below both its queues and
in the data on the device, and killed writers. Misses are the tokens computed beyond those of the
same requests without faults.
Exit status 1 if a block is wrong or a request does not end.
Cost: half a second to a second of one core per hundred faults and kind above the files, on as many
cores as there are; two seconds per hundred stores of all kinds.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import logging
import os
import random
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
MEMORY = Path("/dev/shm")  # noqa: S108 - the file system of kept memory
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "transfer")]

from faulty import KINDS, NONE, NONE_KEPT  # noqa: E402 - after its folder
from verifying_engine import WORLDS, Engine, Request  # noqa: E402 - as above

AT_ONCE = 70
ONE_LIFE = 10  # requests of an engine whose host memory the next one finds
MOST_PARTS = 200
PATIENCE_S = 180


@dataclass
class Row:
    """Results of one kind of fault.

    Attributes:
        kind: what failed.
        faults: how often it did.
        requests: how many ended.
        computed: tokens that they computed.
        misses: how many of those because of the faults.
        wrong: blocks with other bytes than they must have.
        stuck: engines that could not go on.
        what: the first things that went wrong.
    """

    kind: str
    faults: int = 0
    requests: int = 0
    computed: int = 0
    misses: int = 0
    wrong: int = 0
    stuck: int = 0
    what: tuple[str, ...] = ()

    def __iadd__(self, other):
        for name in ("faults", "requests", "computed", "misses", "wrong", "stuck"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.what = (*self.what, *other.what)[:5]
        return self

    @property
    def good(self):
        """Whether nothing went wrong."""
        return not (self.wrong or self.stuck)


def serve(row, kind, seed):
    """Let one engine serve some requests; equal seeds are the same requests for every kind."""
    draw = random.Random(seed)
    world = WORLDS[seed % len(WORLDS)]
    # An engine that is stuck in spite of everything ends the campaign with all its stacks.
    faulthandler.dump_traceback_later(PATIENCE_S, exit=True)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        memory = stack.enter_context(tempfile.TemporaryDirectory(dir=MEMORY)) if kind.keep else None
        keep = None if memory is None else Path(memory) / "host"
        engine = Engine(world, kind.plan(seed), folder if kind.files else None, keep)
        try:
            for number in range(AT_ONCE):
                if kind.keep and number and number % ONE_LIFE == 0:
                    engine = engine.successor()
                engine.serve(Request.batch(draw))
                if draw.random() < 0.5:
                    engine.drain_without_faults()
            engine.close()
        except Exception as error:  # noqa: BLE001 - counted, whatever it is
            row.stuck += 1
            row.what += (f"seed {seed}, {world}: {type(error).__name__}: {error}",)
            engine.abandon()
    faulthandler.cancel_dump_traceback_later()
    row.faults += sum(
        count for (_, fault), count in engine.faults.injected.items() if fault in kind.faults
    )
    row.requests += engine.results.requests
    row.computed += engine.results.computed
    row.wrong += len(engine.wrong)
    row.what = (*row.what, *engine.wrong)[:5]


def part(kind, first):
    """Results of one engine per world, from a seed on: the unit of work of a process."""
    logging.getLogger("kvtrie").addHandler(logging.NullHandler())  # each miss has its reason
    torch.set_num_threads(1)  # the processes share the cores
    row = Row(kind.name)
    for seed in range(first, first + len(WORLDS)):
        serve(row, kind, seed)
    return row


def campaign(kind, wanted, started, advance):
    """Serve requests, part by part, until a kind of fault has come `wanted` times; return the row.

    Parts are counted in the order of their seeds, so that the machine's speed changes nothing.

    Args:
        kind: of fault.
        wanted: how many.
        started: returns the part that begins with a seed, and starts the next parts ahead.
        advance: gets the number of new faults out of those wanted.
    """
    row, parts = Row(kind.name), 0
    while row.good and row.faults < wanted:
        before = min(row.faults, wanted)
        row += started(kind, parts * len(WORLDS))
        parts += 1
        advance(min(row.faults, wanted) - before)
        if parts == MOST_PARTS:
            row.stuck += 1
            row.what += (f"{parts} parts, and only {row.faults} faults of {wanted}",)
    return row, parts


class Ahead:
    """Parts by several processes, a few of which run ahead of the calls that ask for them."""

    def __init__(self, pool, processes):
        self.pool, self.processes = pool, processes
        self.begun = {}

    def __call__(self, kind, first):
        for ahead in range(2 * self.processes):
            seed = first + ahead * len(WORLDS)
            if (kind, seed) not in self.begun:
                self.begun[kind, seed] = self.pool.submit(part, kind, seed)
        return self.begun.pop((kind, first)).result()

    def drop(self, kind):
        """No more of a kind are wanted."""
        for key in [key for key in self.begun if key[0] == kind]:
            self.begun.pop(key).cancel()


def above_the_files(kinds, wanted, processes):
    """The campaigns of all kinds, as rows; first what the same requests are without faults."""
    rows, needed = [], []
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with (
        Progress(*columns, console=Console(stderr=True), transient=True) as bar,
        ProcessPoolExecutor(processes, get_context("spawn")) as pool,
    ):
        started = Ahead(pool, processes)
        task = bar.add_task("", total=wanted * len(kinds))
        for kind in kinds:
            bar.update(task, description=kind.name)
            row, parts = campaign(kind, wanted, started, lambda done: bar.advance(task, done))
            started.drop(kind)
            bar.console.print(
                f"{row.faults} faults, {row.wrong} wrong, {row.stuck} stuck: {row.kind}"
            )
            rows.append(row)
            needed.append(parts)
        unharmed = []
        for none in (NONE, NONE_KEPT):
            alike = [
                (row, parts)
                for kind, row, parts in zip(kinds, rows, needed, strict=True)
                if kind.keep == none.keep
            ]
            bar.update(task, description=none.name)
            unharmed.append(Row(none.name))
            for at in range(max((parts for _, parts in alike), default=0)):
                unharmed[-1] += started(none, at * len(WORLDS))
                for row, parts in alike:
                    if parts == at + 1:
                        row.misses = row.computed - unharmed[-1].computed
            started.drop(none)
    return [*unharmed, *rows]


def below_the_files(cases, kills):
    """The campaigns of the disk tier's files: what they printed, and whether all went well."""
    cargo = shutil.which("cargo")
    if cargo is None:
        return "cargo is not on the path\n", False
    tests = ("--test", "all", "--test", "campaign", "--test", "kill")
    only = ("--ignored", "--nocapture", "--skip", "opening::")
    test = ("-p", "kvtrie-store", *tests, "--", *only)
    ran = subprocess.run(
        [cargo, "test", "--quiet", *test],
        cwd=ROOT,
        env={**os.environ, "KVTRIE_FAULTS": str(cases), "KVTRIE_KILLS": str(kills)},
        capture_output=True,
        text=True,
        check=False,
    )
    went_well = ran.returncode == 0
    return ran.stdout if went_well else ran.stdout + ran.stderr, went_well


def table_of(rows):
    """The rows for people."""
    table = Table("kind", title="Devices that fail below the executor")
    for name in ("faults", "requests", "misses", "wrong blocks", "stuck"):
        table.add_column(name, justify="right")
    for row in rows:
        counts = (row.faults, row.requests, row.misses, row.wrong, row.stuck)
        table.add_row(row.kind, *map(str, counts))
    return table


def main(arguments=None):
    """Run the campaign; returns the exit status."""
    parser = argparse.ArgumentParser(description="Serve requests while devices fail.")
    parser.add_argument("--cases", type=int, default=10_000, help="faults or stores of each kind")
    parser.add_argument(
        "--store-cases", type=int, help="of each kind in Rust; as --cases if not given"
    )
    parser.add_argument(
        "--processes", type=int, default=os.cpu_count() or 1, help="above the files, at a time"
    )
    parser.add_argument("--kills", type=int, default=500, help="writers that are killed")
    parser.add_argument("--rust-only", action="store_true", help="leave out the executor's part")
    parser.add_argument("--python-only", action="store_true", help="leave out the part in Rust")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    given = parser.parse_args(arguments)
    if given.cases < 1:
        parser.error(f"--cases is at least 1, not {given.cases}")
    console = Console(stderr=given.json)
    kinds = () if given.rust_only else KINDS
    rows = above_the_files(kinds, given.cases, given.processes)
    console.print(table_of(rows))
    for row in rows:
        for what in row.what:
            console.print(f"{row.kind}: {what}", markup=False)
    ok = all(row.good for row in rows)
    document = {"rows": [asdict(row) for row in rows]}
    if not given.python_only:
        with ExitStack() as waiting:
            if console.is_terminal:
                waiting.enter_context(console.status("below the files of the disk tier"))
            document["store"], went_well = below_the_files(
                given.store_cases or given.cases, given.kills
            )
        console.print("\nDevices that fail below the files of the disk tier", markup=False)
        console.print(document["store"], markup=False, highlight=False, soft_wrap=True)
        ok = ok and went_well
    if given.json:
        sys.stdout.write(json.dumps(document | {"ok": ok}) + "\n")
    return 0 if ok else 1


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.exit(status)
