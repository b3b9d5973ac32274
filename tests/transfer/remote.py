"""A worker process without a manager: pools and a `Runner`, moves in as bytes, reports out.

Used by `test_runner.py`, which holds the manager and talks to it over a pipe.
"""

import torch
from rig import SHAPE, SIZE

from kvtrie import Moves
from kvtrie.tiers import Pool
from kvtrie.transfer import Runner


def serve(pipe, gpu, host):
    """Answer requests until the pipe is closed."""
    torch.set_num_threads(1)
    pools = [Pool(SHAPE, gpu, SIZE), Pool(SHAPE, host, SIZE)]
    with Runner(pools, workers=2, layers_per_report=1) as runner:
        try:
            while True:
                what, *given = pipe.recv()
                pipe.send({"write": write, "read": read, "carry": carry}[what](runner, *given))
        except EOFError:
            return


def write(runner, slots, kv):
    """Compute, that is put, the KV of some slots of the first tier."""
    pool = runner.pools[0]
    for slot, blocks in zip(slots, kv, strict=True):
        pool.planes[0][pool.units(slot, 0, pool.layers)] = torch.from_numpy(blocks)


def read(runner, slots):
    """The KV of some slots of the first tier."""
    pool = runner.pools[0]
    return [pool.planes[0][pool.units(slot, 0, pool.layers)].numpy() for slot in slots]


def carry(runner, data):
    """Carry moves out to their end; all that was reported."""
    runner.submit(Moves.from_bytes(data))
    return runner.drain()
