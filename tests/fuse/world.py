"""Fixtures for the tests of fusion's store: a small manager, and KV that depends on its tokens."""

from collections import Counter

import numpy as np
import torch

from kvtrie import BlockManager, ModelShape, Tier
from kvtrie.fuse import CacheStore
from kvtrie.fuse.chunker import Given
from kvtrie.tiers import open_pools
from kvtrie.transfer import Executor

LAYERS, HEADS, DIM = 3, 2, 4
SHAPE = ModelShape(layers=LAYERS, kv_heads=HEADS, head_dim=DIM, fingerprint="fuse")
SIZE = 4


def truth(sequence):
    """K and V of a sequence, `(layers, 2, tokens, heads, dim)`: functions of all tokens so far."""
    rows, seen = [], 7
    for token in np.asarray(sequence).tolist():
        seen = (seen * 1_000_003 + token + 1) % (2**31)
        made = torch.Generator().manual_seed(seen)
        rows.append(torch.randn(LAYERS, 2, HEADS, DIM, generator=made))
    return torch.stack(rows, dim=2) if rows else torch.empty(LAYERS, 2, 0, HEADS, DIM)


def world(*, gpu=32, host=32, disk=None, pools=(), clock=None, **options):
    """A manager of memory, or of a first tier and what is given, with its executor."""
    tiers = [Tier("gpu", blocks=gpu), Tier("host", blocks=host)]
    if disk is not None:
        tiers.append(Tier("disk", **disk))
    manager = BlockManager(SHAPE, tiers, block_tokens=SIZE, policy="lru", **options)
    memory = list(open_pools(SHAPE, tiers, SIZE))
    for at, pool in enumerate(pools, len(memory) - len(pools)):
        memory[at] = pool
    more = {} if clock is None else {"clock": clock}
    return Executor(manager, memory, **more)


def store_of(executor, prefix=(), **options):
    return CacheStore(executor, Given(), prefix=prefix, **options)


def compute(fetch, part):
    """Compute what is missing of a part, as a model would; its past must be right already."""
    wanted = truth(part.sequence)
    for layer in range(LAYERS):
        past = fetch.past(part, layer)
        for part_of_past, whole in zip(past, wanted[layer], strict=True):
            assert torch.equal(part_of_past, whole[: part.start])
        fetch.write(part, layer, *wanted[layer][:, part.start :])
    fetch.keep(part)


def fill(store, *chunks):
    """Compute chunks that are not there; returns how many parts were computed."""
    computed = 0
    with store.fetch_many(chunks) as fetch:
        for part in fetch.absent():
            compute(fetch, part)
            computed += 1
    store.executor.drain()
    return computed


def right(store, fetch, part, layer):
    """Whether a part reads as it was computed after the real prefix."""
    before = [] if part is fetch.prefix else store.prefix.tolist()
    wanted = truth([*before, *part.tokens])[layer][:, part.at :]
    return all(torch.equal(*pair) for pair in zip(fetch.read(part, layer), wanted, strict=True))


class Shelf:
    """A storage in memory that counts reads, and fails reads of the units in `lost`."""

    def __init__(self):
        self.units = {}
        self.reads = Counter()
        self.lost = set()
        self.labels = {}

    def write(self, key, slot, layers, memory, label):  # noqa: ARG002
        self.labels[bytes(key)] = label
        for layer, unit in zip(range(*layers), memory, strict=True):
            self.units[bytes(key), layer] = unit.clone()

    def read(self, key, slot, layers, memory):  # noqa: ARG002
        for layer, unit in zip(range(*layers), memory, strict=True):
            self.reads[bytes(key), layer] += 1
            if (bytes(key), layer) in self.lost:
                raise OSError(f"layer {layer} is damaged")
            unit.copy_(self.units[bytes(key), layer])
