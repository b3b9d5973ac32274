"""Kill writers of a kept file at random points, and look at what the next process finds.

`python kept_kills.py PATH KILLS [SEED]`. A writer is a fork of this process, which has no threads.
It notes in shared memory what it begins and what it has sealed; a block's bytes are a function of
its key. Prints counts as JSON.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import signal
import struct
import sys
import time

import numpy as np

from kvtrie import BlockManager, ModelShape, Tier
from kvtrie.tiers.kept_tier import kept_pool

SHAPE = ModelShape(layers=4, kv_heads=1, head_dim=64, dtype="int8", fingerprint="kills")
SIZE = 4
SLOTS = 24
NAMES = 40
READY = SLOTS  # the journal's last row
NOTE = struct.Struct("<iHH")  # the sealed block's number or -1, its layers


def make_names():
    """Key and label of blocks: paths of four."""
    tiers = [Tier("gpu", blocks=NAMES)]
    manager = BlockManager(SHAPE, tiers, block_tokens=SIZE)
    for at in range(NAMES // 4):
        tokens = np.arange(4 * SIZE, dtype=np.uint32) + 1000 * at
        with manager.acquire(tokens, now=0, keep=0) as lease:
            lease.commit(tokens, now=0)
    index = manager.index(0, now=0)
    return [(key.tobytes(), label) for key, (label, *_) in zip(index.key, index, strict=True)]


def content(number):
    """The bytes of a block, `(layers, bytes)`."""
    draw = np.random.default_rng(number)
    return draw.integers(0, 256, (SHAPE.layers, SHAPE.layer_bytes(SIZE)), dtype=np.uint8)


def write(path, names, bytes_of, journal, seed):
    """Write blocks until killed."""
    draw = random.Random(seed)
    pool = kept_pool(SHAPE, Tier("host", blocks=SLOTS, keep=path), SIZE)
    plane = pool.planes[0].numpy()
    begun, number_of = {}, {label: number for number, (_, label) in enumerate(names)}
    NOTE.pack_into(journal, READY * NOTE.size, 1, 0, 0)
    while True:
        slot, number = draw.randrange(SLOTS), draw.randrange(NAMES)
        lo = draw.choice([0, 0, 0, draw.randrange(SHAPE.layers)])
        hi = draw.randrange(lo, SHAPE.layers) + 1
        key, label = names[number]
        NOTE.pack_into(journal, slot * NOTE.size, -1, 0, 0)
        slots = np.array([slot])
        if pool.begin(slots, [key], (lo, hi)):
            continue
        for layer in range(lo, hi):
            plane[slot * SHAPE.layers + layer] = bytes_of[number][layer]
        ok = draw.random() > 0.05
        pool.finish(slots, [key], [label], ok=ok)
        begun[slot] = label if ok else None
        if pool.unsealed > draw.randrange(4):
            waiting = {one.place: one for one in pool._unsealed}
            pool._seal_all()
            for one in waiting.values():
                if begun[one.place] == one.label:  # otherwise it is being written again
                    NOTE.pack_into(
                        journal, one.place * NOTE.size, number_of[one.label], *one.layers
                    )


def look(path, names, bytes_of, journal, counts):
    """Compare what is found with what was sealed."""
    pool = kept_pool(SHAPE, Tier("host", blocks=SLOTS, keep=path), SIZE)
    numbers = {key: number for number, (key, _) in enumerate(names)}
    index = pool.recall()
    found = {}
    plane = pool.planes[0].numpy()
    for key, slot, lo, hi in zip(
        index.key, index.slot.tolist(), index.layer_lo, index.layer_hi, strict=True
    ):
        number = numbers[key.tobytes()]
        if not pool.verify(np.array([slot]), [key.tobytes()]):
            found[slot] = number, int(lo), int(hi)
            rows = plane[slot * SHAPE.layers + lo : slot * SHAPE.layers + hi]
            counts["wrong"] += not np.array_equal(rows, bytes_of[number][lo:hi])
    for slot in range(SLOTS):
        number, lo, hi = NOTE.unpack_from(journal, slot * NOTE.size)
        if number < 0:
            continue
        counts["sealed"] += 1
        counts["found"] += found.get(slot) == (number, lo, hi)
    counts["blocks"] += len(found)
    for reason, lost in pool.lost_blocks.items():
        counts[reason] = counts.get(reason, 0) + lost
    # The next writer begins with what was found.
    for slot in range(SLOTS):
        NOTE.pack_into(journal, slot * NOTE.size, *found.get(slot, (-1, 0, 0)))
    pool.close()


def main(path, kills, seed=0):
    """Kill `kills` writers."""
    names = make_names()
    bytes_of = [content(number) for number in range(NAMES)]
    journal = mmap.mmap(-1, (SLOTS + 1) * NOTE.size)
    draw = random.Random(seed)
    counts = {"kills": 0, "sealed": 0, "found": 0, "blocks": 0, "wrong": 0}
    for slot in range(SLOTS):
        NOTE.pack_into(journal, slot * NOTE.size, -1, 0, 0)
    while counts["kills"] < kills:
        NOTE.pack_into(journal, READY * NOTE.size, 0, 0, 0)
        child = os.fork()
        if not child:
            write(path, names, bytes_of, journal, f"{seed} {counts['kills']}")
        until = time.monotonic() + 30
        while not NOTE.unpack_from(journal, READY * NOTE.size)[0]:
            assert time.monotonic() < until, "the writer did not begin"
            time.sleep(0)
        # The kill has to fall at a random point of the writer's work.
        time.sleep(draw.random() * 0.004)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        counts["kills"] += 1
        look(path, names, bytes_of, journal, counts)
    sys.stdout.write(json.dumps(counts) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
