"""Helpers of layer-wise tests: worlds of two or three tiers, a slow device, compared layers."""

import threading

import torch
from rig import SHAPE, SIZE, Shelf, rows

from kvtrie import BlockManager, Tier
from kvtrie.tiers import Pool, open_pools

LAYERS = SHAPE.layers

WORLDS = {
    "host": {},
    "layer slots": {"layer_slots": True},
    "disk": {"host": 8, "disk": 60},
    "no room in transit": {"host": 2, "disk": 60},
}


def world(*, gpu=6, host=60, disk=0, write="back", staging=0, layer_slots=False):
    tiers = [
        Tier("gpu", blocks=gpu, write=write, layer_slots=layer_slots),
        Tier("host", blocks=host, layer_slots=layer_slots),
        *([Tier("disk", blocks=disk)] if disk else []),
    ]
    manager = BlockManager(SHAPE, tiers, block_tokens=SIZE)
    pools = list(open_pools(SHAPE, tiers, SIZE, staging=staging))
    if disk:
        pools[2] = Shelf()
    return manager, pools


def layer_of(pool, lease, tokens, layer):
    return torch.stack(pool.gather(*rows(pool, lease, tokens)[layer]))


def retrieved(engine, tokens, kv):
    """Retrieve a prompt and compare each layer as soon as it is yielded; the hit count."""
    pool = engine.executor.pools[0]
    with engine.acquire(tokens, keep=0, load="all") as lease:
        hit = lease.matched
        steps_seen = []
        for step in engine.retrieve_layer(lease):
            steps_seen.append(step)
            if 1 < len(steps_seen) < LAYERS + 2:
                assert torch.equal(layer_of(pool, lease, hit, step), kv[step][:, :hit])
                if engine.settings.blending:
                    laid_out = torch.stack(engine.buffer(lease, step))
                    assert torch.equal(laid_out, kv[step][:, :hit])
        assert steps_seen == [hit, *range(LAYERS), hit]
        assert lease.ready()
    return hit


class Slow(Pool):
    """A device that records which layers' loads or stores have begun."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.begun = threading.Condition()
        self.layers_begun = set()
        self.copies = 0

    def copy_from(self, source, source_units, units):
        with self.begun:
            self.layers_begun.add(int(source_units[0]) % self.layers)
            self.copies += 1
            self.begun.notify_all()
        super().copy_from(source, source_units, units)


class Deadlock(Exception):  # noqa: N818 - what the fake device reports
    """The computation waits for a copy that nothing will start."""


def compute(device, stream, layer):
    """A layer's computation, which ends when the copy of that layer has begun.

    The stream gets a mark after all its work: if the mark comes first, nothing will start the copy
    while the computation waits.
    """
    passed = threading.Event()

    def mark():
        with device.begun:
            passed.set()
            device.begun.notify_all()

    stream.submit(mark)
    with device.begun:
        device.begun.wait_for(lambda: layer in device.layers_begun or passed.is_set())
        if layer not in device.layers_begun:
            raise Deadlock(layer)
