"""The disk tier compared with fio: the same sizes and depths, in turn, in one run.

A pair is one run of fio and one of ours on the same folder, in turn first. Ours reads and writes
through `DiskStore` as the tier does: keys, headers, checksums of every layer, manifest. The page
cache is dropped before each run where that is permitted; each run goes over blocks in a random
order, none twice before all others. Absolute speed wobbles, so the median of the pairs' ratios
counts.
Invariant: both sides move blocks of one size, keep as many under way, and meet files of one length
that were written before. Cost: two runs of `--seconds` per pair, and the data once per size.
"""

from __future__ import annotations

import json
import mmap
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from benches.core.place import place
from benches.record import Result, document, keep, options
from kvtrie import BlockManager, ModelShape, Tier
from kvtrie._kvtrie import DiskStore

OUT = Path(__file__).parent / "results" / "disk.json"
GOAL = 0.95
MIB = 1 << 20
TOKENS = 16
BATCH = 1024 * MIB  # of a call, at whose end fewer blocks are under way than fio has
DROP = Path("/proc/sys/vm/drop_caches")
DATA = 6 << 30  # bytes of each side
QUICK = 64 * MIB
WAYS = ("direct", "buffered")
VERBS = ("read", "write")


@dataclass(frozen=True)
class Shape:
    """One size of blocks.

    Attributes:
        name: for people.
        layers: layers of a block.
        layer_bytes: bytes of a layer.
        depth: blocks under way.
    """

    name: str
    layers: int
    layer_bytes: int
    depth: int

    @property
    def size(self):
        """Bytes of a block."""
        return self.layers * self.layer_bytes


# 32 MiB is a chunk of 256 tokens of a model with 8 B weights, 1 MiB a block of a small one.
SHAPES = (Shape("32 MiB", 32, MIB, 4), Shape("1 MiB", 16, 64 * 1024, 8))


def drop_caches():
    """Drop the page cache; return whether that was permitted."""
    os.sync()
    try:
        DROP.write_text("3\n")
    except OSError:
        return False
    return True


class Ours:
    """A store full of blocks, and memory to move a batch of them."""

    def __init__(self, folder, shape, total, io):
        self.shape, self.io = shape, io
        self.blocks = max(total // shape.size, 4 * shape.depth)
        self.keys, self.labels = named(self.blocks)
        self.store = DiskStore(
            folder,
            identity=shape.name.encode().ljust(32),
            about=json.dumps({"bench": shape.name}),
            layers=shape.layers,
            layer_bytes=shape.layer_bytes,
            block_tokens=TOKENS,
            blocks=self.blocks,
            io=io,
        )
        batch = max(min(BATCH // shape.size, self.blocks), 2)
        self.memory = [self._memory(batch, seed) for seed in range(2)]
        self.draw = np.random.default_rng(1)
        # Which block stands in each slot. One that is there already is not written again, so a
        # write puts the next one there.
        self.blocks_by_slot = np.arange(-1, self.blocks - 1)

    def _memory(self, batch, seed):
        size, shape = self.shape.size, self.shape
        # Ordinary pages, as fio's buffers have them; a pool's are large where the system has such.
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        paged = np.frombuffer(mmap.mmap(-1, batch * size, flags=private), np.uint8)
        # Nothing that a device could make smaller; fio's buffers are random too.
        paged.view(np.uint64)[:] = np.random.default_rng(seed).integers(
            0, 1 << 64, batch * size // 8, dtype=np.uint64
        )
        return paged.reshape(batch, shape.layers, shape.layer_bytes)

    def fill(self):
        """Write every block once."""
        slots = np.arange(self.blocks)
        memory = self.memory[0]
        for first in range(0, self.blocks, len(memory)):
            batch = slots[first : first + len(memory)]
            self._call("write", batch, memory, self.shape.depth)
        self.store.sync()

    def _call(self, verb, slots, memory, depth):
        layers = (0, self.shape.layers)
        if verb == "read":
            outcome = self.store.read_many(
                [
                    (self.keys[self.blocks_by_slot[slot]], slot, layers, block)
                    for slot, block in zip(slots.tolist(), memory, strict=False)
                ],
                depth=depth,
            )
        else:
            self.blocks_by_slot[slots] = (self.blocks_by_slot[slots] + 1) % self.blocks
            outcome = self.store.write_many(
                [
                    (
                        self.keys[self.blocks_by_slot[slot]],
                        slot,
                        layers,
                        block,
                        self.labels[self.blocks_by_slot[slot]],
                    )
                    for slot, block in zip(slots.tolist(), memory, strict=False)
                ],
                time.time_ns(),
                depth=depth,
            )
        if failed := [why for why in outcome if why]:
            raise SystemExit(f"{verb} failed: {failed[0]}")

    def run(self, verb, seconds):
        """Bytes per second, and the share of one core, over some seconds."""
        order = self.draw.permutation(self.blocks)
        threads = min(2, self.shape.depth)
        moved, lock, at = [0] * threads, threading.Lock(), [0]
        stop = time.perf_counter() + seconds

        def work(mine):
            memory = self.memory[mine]
            depth = self.shape.depth // threads
            while time.perf_counter() < stop:
                with lock:
                    if at[0] >= self.blocks:
                        at[0] = 0
                    first = at[0]
                    at[0] += len(memory)
                batch = order[first : first + len(memory)]
                self._call(verb, batch, memory, depth)
                moved[mine] += len(batch) * self.shape.size

        used = resource.getrusage(resource.RUSAGE_SELF)
        began = time.perf_counter()
        workers = [threading.Thread(target=work, args=(mine,)) for mine in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        took = time.perf_counter() - began
        now = resource.getrusage(resource.RUSAGE_SELF)
        busy = now.ru_utime - used.ru_utime + now.ru_stime - used.ru_stime
        return sum(moved) / took, busy / took


def named(count):
    """Keys and labels of `count` blocks, from a manager that counts them as present."""
    model = ModelShape(layers=1, kv_heads=1, head_dim=64, dtype="float16", fingerprint="bench")
    manager = BlockManager(model, [Tier("disk", blocks=count, owner="none")], block_tokens=TOKENS)
    tokens = np.arange(count * TOKENS, dtype=np.uint32)
    manager.mark(tokens, "disk", present=True, now=1)
    index = manager.index(now=2)
    return [key.tobytes() for key in index.key], [row[0] for row in index]


class Fio:
    """fio on a file of the same length."""

    def __init__(self, folder, shape, total, io):
        self.path, self.shape = folder / "fio", shape
        self.size = max(total // shape.size, 4 * shape.depth) * shape.size
        self.direct = int(io == "direct")

    def _play(self, *options):
        outcome = subprocess.run(
            [
                shutil.which("fio") or "fio",
                "--name=kvtrie",
                f"--filename={self.path}",
                f"--size={self.size}",
                f"--bs={self.shape.size}",
                f"--iodepth={self.shape.depth}",
                f"--direct={self.direct}",
                "--ioengine=io_uring",
                "--output-format=json",
                *options,
            ],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        return json.loads(outcome[outcome.index("{") :])["jobs"][0]

    def fill(self):
        """Write the file once."""
        self._play("--rw=write", "--end_fsync=1")

    def run(self, verb, seconds):
        """Bytes per second, and the share of one core, over some seconds."""
        job = self._play(
            f"--rw=rand{verb}", "--time_based", f"--runtime={seconds}", "--randrepeat=0"
        )
        return job[verb]["bw_bytes"], (job["usr_cpu"] + job["sys_cpu"]) / 100


def quartiles(values):
    """First quartile, median, third quartile."""
    if len(values) == 1:
        return values * 3
    return statistics.quantiles(values, n=4, method="inclusive")


def measure(verb, given, sides, step):
    """Pairs of runs as one row."""
    fio, ours = sides
    shape, io = ours.shape, ours.io
    theirs, mine = [], []
    dropped = True
    for pair in range(given.pairs):
        turn = [(fio, theirs), (ours, mine)]
        for side, results in turn if pair % 2 == 0 else turn[::-1]:
            dropped = drop_caches() and dropped
            results.append(side.run(verb, given.seconds))
            step()
    ratios = [our[0] / their[0] for our, their in zip(mine, theirs, strict=True)]
    low, middle, high = quartiles(ratios)
    goal = GOAL if io == "direct" else None
    return Result(
        what=f"{verb}, {shape.name}, {io}",
        ours=statistics.median(speed for speed, _ in mine),
        unit="B/s",
        peer=statistics.median(speed for speed, _ in theirs),
        peer_name="fio",
        ratio=middle,
        goal=goal,
        ok=None if goal is None else middle >= goal,
        more={
            "size": shape.name,
            "verb": verb,
            "io": io,
            "depth": shape.depth,
            "pairs": given.pairs,
            "seconds": given.seconds,
            "date": place()["date"],
            "load": place()["load"][0],
            "page_cache_dropped": dropped,
            "ours_cpu": statistics.median(cpu for _, cpu in mine),
            "fio_cpu": statistics.median(cpu for _, cpu in theirs),
            "ratio_low": low,
            "ratio_high": high,
            "ratios": ratios,
        },
    )


def printed(rows):
    """The table of the screen."""
    table = Table("blocks", "", "I/O", title="The disk tier compared with fio")
    for name in ("ours GB/s", "fio GB/s", "ratio", "quartiles", "cores", "of fio"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.more["size"],
            row.more["verb"],
            row.more["io"],
            f"{row.ours / 1e9:.2f}",
            f"{row.peer / 1e9:.2f}",
            f"{row.ratio:.3f}",
            f"{row.more['ratio_low']:.3f} to {row.more['ratio_high']:.3f}",
            f"{row.more['ours_cpu']:.2f}",
            f"{row.more['fio_cpu']:.2f}",
        )
    return table


def file_system(folder):
    """The kind of file system that a folder is on."""
    outcome = subprocess.run(
        [shutil.which("stat") or "stat", "-f", "-c", "%T", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    return outcome.stdout.strip() or "unknown file system"


def play(given, folder, bar):
    """All cells; their rows, and by what queue ours went."""
    rows: list[Result] = []
    queue = ""
    cells = list(product(SHAPES, WAYS))
    step = bar.add_task("", total=len(cells) * len(VERBS) * given.pairs * 2)
    for shape, io in cells:
        own = folder / f"{shape.layers}-{io}"
        own.mkdir()
        total = QUICK if given.quick else DATA
        ours, fio = Ours(own, shape, total, io), Fio(own, shape, total, io)
        bar.update(step, description=f"{shape.name}, {io}: filling")
        fio.fill()
        ours.fill()
        for verb in VERBS:
            bar.update(step, description=f"{shape.name}, {io}: {verb}")
            sides = (fio, ours)
            rows.append(measure(verb, given, sides, lambda: bar.advance(step)))
        direct, queue, reasons = ours.store.travel
        if direct != (io == "direct"):
            raise SystemExit(f"asked for {io}: {'; '.join(reasons)}. Give another --folder")
        ours.store.close()
        shutil.rmtree(own)
    return rows, queue


def main():
    """Measure, print, write."""
    parser = options(__doc__, OUT)
    parser.add_argument("--pairs", type=int, help="of runs (default: 9)")
    parser.add_argument("--seconds", type=int, help="of each run (default: 5)")
    parser.add_argument("--folder", type=Path, help="folder of the files; the default is temporary")
    given = parser.parse_args()
    if given.pairs is None:
        given.pairs = 1 if given.quick else 9
    if given.seconds is None:
        given.seconds = 1 if given.quick else 5
    if shutil.which("fio") is None:
        parser.error("fio is not on the path: it is in your distribution's packages")
    if min(given.pairs, given.seconds) < 1:
        parser.error("pairs and seconds are at least 1")
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with (
        tempfile.TemporaryDirectory(dir=given.folder) as folder,
        Progress(*columns, console=Console(stderr=True), transient=True) as bar,
    ):
        context = place() | {
            "data_bytes": QUICK if given.quick else DATA,
            "pool_bytes": 2 * BATCH,
            "file_system": file_system(folder),
        }
        rows, context["queue"] = play(given, Path(folder), bar)
    if not keep(given, document(context, rows)):
        Console().print(printed(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
