"""Requests of executors on a shared store, every byte compared, and damage to the store's values.

Invariant: the KV of a block is a function of the tokens up to its end, so that a wrong block shows
in any process that finds it.
"""

from __future__ import annotations

import hashlib
import time
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from kvtrie import BlockManager, ModelShape, Tier
from kvtrie.tiers import open_pools
from kvtrie.transfer import Executor

SHAPE = ModelShape(layers=4, kv_heads=2, head_dim=8, fingerprint="requests")
SIZE = 4
BLOCKS = 6
DEADLINE_S = 0.5
PREFETCH_S = 0.2


class WrongBlockError(AssertionError):
    """A request found KV that no prefill of its tokens gives."""


class Answer(NamedTuple):
    """A request that has been answered.

    Attributes:
        hit: tokens found in a cache.
        seconds: from its arrival to its end.
        computing: seconds of these for the KV of all its tokens, which a prefill computes.
    """

    hit: int
    seconds: float
    computing: float


def executor_of(url, deadline_s=DEADLINE_S, gpu=8, host=8):
    """An executor with little local memory, which writes every block to the store at once."""
    tiers = [
        Tier("gpu", blocks=gpu, write="through"),
        Tier("host", blocks=host, write="through"),
        Tier("remote", blocks=100_000, path=url, trust_s=0.5),
    ]
    manager = BlockManager(SHAPE, tiers, block_tokens=SIZE)
    return Executor(manager, open_pools(SHAPE, tiers, SIZE), deadline_s=deadline_s)


def close(executor):
    """Close an executor of `executor_of` and the connections of its store."""
    executor.close()
    executor.pools[2].close()


@contextmanager
def serving(url, deadline_s=DEADLINE_S, **rooms):
    """An executor of `executor_of`, closed with its store at the end."""
    executor = executor_of(url, deadline_s, **rooms)
    try:
        yield executor
    finally:
        close(executor)


def prompts_of(count=6):
    """Prompts of which pairs share their first half."""
    prompts = [[seed * 997 + at for at in range(BLOCKS * SIZE)] for seed in range(count)]
    return prompts + [prompt[: 3 * SIZE] + [5] * (3 * SIZE) for prompt in prompts]


def prefill(tokens):
    """The KV of a prompt: that of a block depends on all tokens up to its end."""
    blocks = []
    for end in range(SIZE, len(tokens) + 1, SIZE):
        seed = int.from_bytes(hashlib.sha256(str(tokens[:end]).encode()).digest()[:7])
        generator = torch.Generator().manual_seed(seed)
        blocks.append(torch.randn(SHAPE.layers, 2, SIZE, 2, 8, generator=generator))
    return torch.cat(blocks, dim=2)


def request(executor, tokens, load="plan", prefetch_s=PREFETCH_S):
    """Answer a prompt: tokens found in a cache are compared, the rest is computed.

    Raises:
        WrongBlockError: a byte differs.
        NoSpaceError: slots are quarantined while the store hangs.
    """
    began = time.monotonic()
    manager, pool = executor.manager, executor.pools[0]
    executor.prefetch(tokens, deadline_s=prefetch_s)
    with manager.acquire(tokens, now=executor.clock(), keep=0, load=load) as lease:
        executor.wait(lease)
        start = time.monotonic()
        found, want = lease.matched, prefill(tokens)
        cached = torch.arange(len(tokens)) < found
        cached[torch.as_tensor(lease.plan.recompute().astype(int))] = False
        table, at = pool.table(lease.slots(0)), torch.arange(len(tokens))
        for layer, slots in enumerate(table):
            where = (slots[at // SIZE], at % SIZE)
            for kv, right in zip(pool.gather(*where), want[layer], strict=True):
                if not torch.equal(kv[cached], right[cached]):
                    raise WrongBlockError(f"layer {layer} of {tokens[:2]}…, {found} tokens found")
            pool.scatter(*(part[~cached] for part in where), *want[layer][:, ~cached])
        computing = time.monotonic() - start
        lease.commit(tokens[found:], now=executor.clock())
    return Answer(int(cached.sum()), time.monotonic() - began, computing)


class FolderValues:
    """Values in the files of a folder."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)

    def names(self):
        return sorted(file for file in self.folder.glob("[0-9a-f][0-9a-f]/*") if file.is_file())

    def get(self, name):
        return name.read_bytes()

    def set(self, name, value):
        name.write_bytes(value)

    def remove(self, name):
        name.unlink(missing_ok=True)


def damage(store, rng):
    """Flip, cut, empty, swap, replace or remove a value; its kind, or None without two values."""
    names = store.names()
    if len(names) < 2:
        return None
    name, other = rng.sample(names, 2)
    value = bytearray(store.get(name))
    kind = rng.choice(["flip", "cut", "empty", "swap", "foreign", "remove"])
    if kind == "remove" or not value:
        store.remove(name)
        return "remove"
    if kind == "flip":
        value[rng.randrange(len(value))] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del value[rng.randrange(len(value)) :]
    elif kind == "empty":
        value.clear()
    elif kind == "swap":
        value = store.get(other)
    else:
        value = rng.randbytes(len(value))
    store.set(name, bytes(value))
    return kind
