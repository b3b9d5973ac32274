"""A restart in three parts: opening the files, listing what is in them, taking it into a manager.

The blocks are real and as small as a disk's slots are, 12 KiB each, in chains of a hundred whose
slots are in random order, written by a process that ends then. Wall time is what a server waits;
processor time does not count other work on the machine. Invariant: every block is found again.
Cost: the blocks are written once, 12 KiB each.
"""

from __future__ import annotations

import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benches.core.place import place
from benches.record import keep, options
from kvtrie import BlockManager, ModelShape, Tier
from kvtrie._kvtrie import DiskStore

TOKENS = 16
CHAIN = 100
BATCH = 10_000


def manager(blocks):
    """An empty manager with a disk of `blocks` blocks."""
    model = ModelShape(layers=1, kv_heads=1, head_dim=64, dtype="float16", fingerprint="bench")
    tiers = [Tier("gpu", blocks=16, owner="none"), Tier("disk", blocks=blocks, owner="none")]
    return BlockManager(model, tiers, block_tokens=TOKENS)


def files(folder, blocks):
    """The files of `blocks` blocks of one byte."""
    return DiskStore(
        folder,
        identity=b"restart".ljust(32),
        about="{}",
        layers=1,
        layer_bytes=1,
        block_tokens=TOKENS,
        blocks=blocks,
        io="buffered",
    )


def fill(folder, blocks):
    """Write the blocks that a manager counts as present."""
    filled = manager(blocks)
    for chain in range(blocks // CHAIN):
        tokens = np.arange(CHAIN * TOKENS, dtype=np.uint32)
        tokens[0] = CHAIN * TOKENS + chain
        filled.mark(tokens, "disk", present=True, now=1 + chain)
    index = filled.index(now=blocks)
    memory = np.zeros((1, 1), dtype=np.uint8)
    # On a disk that was full once, the slots of a path are in random order.
    slots = np.random.default_rng(1).permutation(blocks).tolist()
    rows = zip(index.key, index, slots, strict=True)
    given = [(key.tobytes(), slot, (0, 1), memory, row[0]) for key, row, slot in rows]
    store = files(folder, blocks)
    with Progress(console=Console(stderr=True), transient=True) as bar:
        for first in bar.track(range(0, blocks, BATCH), description="writing"):
            failed = [why for why in store.write_many(given[first : first + BATCH], 0) if why]
            if failed:
                raise SystemExit(f"writing failed: {failed[0]}")
    store.close()


def timed(rows, name, call):
    """Do something and note how long it took."""
    wall, busy = time.perf_counter(), time.process_time()
    done = call()
    rows.append((name, time.perf_counter() - wall, time.process_time() - busy))
    return done


def main():
    """Measure and print."""
    parser = options(__doc__)
    parser.add_argument("--blocks", type=int, help="default: a million")
    parser.add_argument("--folder", type=Path, help="folder of the files; the default is temporary")
    given = parser.parse_args()
    given.blocks = given.blocks or (10 * CHAIN if given.quick else 1_000_000)
    if given.blocks < CHAIN or given.blocks % CHAIN:
        parser.error(f"--blocks is a multiple of {CHAIN}")
    rows: list[tuple[str, float, float]] = []
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        # A separate process, since a restart begins with fresh memory.
        with ProcessPoolExecutor(1, get_context("spawn")) as before:
            before.submit(fill, folder, given.blocks).result()
        store = timed(rows, "opening the files", lambda: files(folder, given.blocks))
        index = timed(rows, "listing", lambda: store.index(0))
        later = manager(given.blocks)
        found = timed(rows, "taking it into a manager", lambda: later.load_index(index, now=1))
        store.close()
    if found != given.blocks:
        raise SystemExit(f"{found} of {given.blocks} blocks were found again")
    parts = {name: {"seconds": wall, "processor_seconds": busy} for name, wall, busy in rows}
    if keep(given, {"place": place(), "blocks": given.blocks, "parts": parts}):
        return 0
    table = Table("part", title=f"A restart with {given.blocks:,} blocks")
    for name in ("seconds", "processor seconds", "µs a block"):
        table.add_column(name, justify="right")
    for name, wall, busy in rows:
        table.add_row(name, f"{wall:.2f}", f"{busy:.2f}", f"{wall / given.blocks * 1e6:.2f}")
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
