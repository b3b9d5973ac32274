"""Helpers of executor tests: a small world, devices that wait for a signal, KV to compare.

The clock moves only when a test sets it, and a copy waits until a test lets it go: nothing here
depends on how fast a machine is.
"""

from __future__ import annotations

import threading

import numpy as np
import torch

from kvtrie import BlockManager, ModelShape, Tier
from kvtrie.tiers import Pool, open_pools

SHAPE = ModelShape(layers=4, kv_heads=2, head_dim=4, fingerprint="rig")
SIZE = 4


EARLIER = set()
"""Threads that ran before the test began, as those that a failed test of another folder left."""


def working():
    """The names of kvtrie's threads; other libraries have threads too."""
    names = [thread.name for thread in threading.enumerate() if thread not in EARLIER]
    return [name for name in names if name.startswith("kvtrie-")]


class Time:
    """A clock that a test sets."""

    def __init__(self):
        self.now = 1_000_000_000

    def __call__(self):
        return self.now


class Gate(Pool):
    """A pool whose copies into it wait for a signal, and then go through or fail.

    Its diary records every copy when it begins: the target pool, and the first slot.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.entered = threading.Semaphore(0)
        self.leave = threading.Semaphore(0)
        self.error = None
        self.diary = []

    def copy_from(self, source, source_units, units):
        self.diary.append((self, int(source_units[0]) // self.layers))
        self.entered.release()
        assert self.leave.acquire(timeout=30)
        if self.error is not None:
            raise self.error
        super().copy_from(source, source_units, units)

    def open(self):
        """Let whatever comes go through."""
        self.leave.release(1000)

    def shut(self):
        """Stop the next copy, and forget those that went through."""
        for semaphore in (self.entered, self.leave):
            while semaphore.acquire(blocking=False):
                pass


class Shelf:
    """A storage in a dict, as a disk would be: whole units, by key."""

    def __init__(self):
        self.units = {}

    def write(self, key, slot, layers, memory, label):  # noqa: ARG002
        for layer, unit in zip(range(*layers), memory, strict=True):
            self.units[bytes(key), layer] = unit.clone()

    def read(self, key, slot, layers, memory):  # noqa: ARG002
        for layer, unit in zip(range(*layers), memory, strict=True):
            unit.copy_(self.units[bytes(key), layer])


def world(gpu=4, host=12, form=(False, False), write="back"):
    tiers = [
        Tier("gpu", blocks=gpu, layer_slots=form[0], write=write),
        Tier("host", blocks=host, layer_slots=form[1]),
    ]
    manager = BlockManager(SHAPE, tiers, block_tokens=SIZE)
    return manager, list(open_pools(SHAPE, tiers, SIZE))


def gated(gpu=6, write="back"):
    """A world whose pools let everything through until they are shut, and keep one diary."""
    manager, pools = world(gpu=gpu, host=40, write=write)
    pools = [Gate(SHAPE, gpu, SIZE), Gate(SHAPE, 40, SIZE)]
    pools[1].diary = pools[0].diary
    for pool in pools:
        pool.open()
    return manager, pools


def prompt(seed, blocks):
    return np.random.default_rng(seed).integers(0, 1000, blocks * SIZE)


def rows(pool, lease, tokens):
    """Units and offsets of the first tokens of a lease, per layer."""
    table = pool.table(lease.slots(0))
    at = torch.arange(tokens)
    return [(layer[at // SIZE], at % SIZE) for layer in table]


def store(executor, tokens, seed):
    """Compute, that is invent, the KV of a prompt and commit it; returns what was written."""
    generator = torch.Generator().manual_seed(seed)
    manager, pool = executor.manager, executor.pools[0]
    with manager.acquire(tokens, now=executor.clock(), keep=0) as lease:
        assert lease.matched == 0
        executor.wait(lease)
        written = []
        for where in rows(pool, lease, len(tokens)):
            kv = torch.randn(2, len(tokens), 2, 4, generator=generator)
            pool.scatter(*where, *kv)
            written.append(kv)
        lease.commit(tokens, now=executor.clock())
    return torch.stack(written)


def fetch(executor, tokens):
    """KV in the slots of a prompt that is fully cached."""
    manager, pool = executor.manager, executor.pools[0]
    with manager.acquire(tokens, now=executor.clock(), keep=0, load="all") as lease:
        assert lease.matched == len(tokens)
        executor.wait(lease)
        assert len(lease.plan.recompute()) == 0
        return torch.stack([torch.stack(pool.gather(*at)) for at in rows(pool, lease, len(tokens))])


def away(executor, tokens, seed):
    """Keep a prompt and fill the first tier with others, so that only the host has it."""
    written = store(executor, tokens, seed)
    executor.drain()
    store(executor, prompt(seed + 1000, executor.pools[0].blocks), seed + 1000)
    executor.drain()
    return written
