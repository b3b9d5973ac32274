"""Engines over a disk tier's folder, and faults planted in its files.

The KV of a token is a function of all tokens up to its block's end, so a test can check
any block that it finds, also one that it has not seen before.
"""

from __future__ import annotations

import hashlib
from contextlib import contextmanager
from unittest import mock

import numpy as np
import torch

from kvtrie import BlockManager, ModelShape, Tier
from kvtrie._kvtrie import DiskStore
from kvtrie.tiers import DiskStorage, open_pools
from kvtrie.transfer import Executor

SHAPE = ModelShape(layers=4, kv_heads=2, head_dim=4, fingerprint="kept")
SIZE = 4
DISK = 32
PAGE = 4096
WALL = 10**18
SECOND = 10**9


class Clock:
    """A clock that the test moves."""

    def __init__(self, now):
        self.now = now

    def __call__(self):
        return self.now


def open_disk(*args, faults=None, **settings):
    """A `DiskStorage`; with `faults`, on a device that fails on demand."""
    if faults is None:
        return DiskStorage(*args, **settings)
    with mock.patch("kvtrie.tiers.disk.DiskStore", faults.open):
        return DiskStorage(*args, **settings)


@contextmanager
def serving(folder, *, gpu=4, host=8, disk=DISK, shape=SHAPE, size=SIZE, wall=None, **settings):
    """An executor over gpu, host and a disk in `folder`; what `DiskStorage` takes is given to it.

    Nothing is saved at the end: tests say when.
    """
    mine = ("layout", "rank", "durability", "faults")
    own = {name: settings.pop(name) for name in mine if name in settings}
    rooms = {"gpu": gpu, "host": host, "disk": disk}
    layout = own.get("layout")
    tiers = [Tier(kind, blocks=blocks, layout=layout) for kind, blocks in rooms.items()]
    manager = BlockManager(shape, tiers, block_tokens=size)
    storage = open_disk(folder, shape, disk, size, clock=wall or Clock(WALL), **own)
    memory = open_pools(shape, tiers[:2], size)
    settings = {"workers": 0, **settings}
    with storage, Executor(manager, [*memory, storage], **settings) as executor:
        yield executor


def prompt(seed, blocks=1):
    return np.random.default_rng(seed).integers(0, 1000, blocks * SIZE)


def kv(tokens, shape=SHAPE, size=SIZE):
    """K and V `(layers, 2, tokens, kv_heads, head_dim)` that a model would compute."""
    blocks = []
    for end in range(size, len(tokens) + 1, size):
        path = np.asarray(tokens[:end], dtype=np.int64).tobytes()
        seed = int.from_bytes(hashlib.blake2b(path, digest_size=8).digest())
        wanted = (shape.layers, 2, size, shape.kv_heads, shape.head_dim)
        blocks.append(np.random.default_rng(seed).random(wanted, dtype=np.float32))
    return torch.from_numpy(np.concatenate(blocks, axis=2))


def ask(executor, tokens, load="all"):
    """A whole request for full blocks: what is cached must be right, the rest is computed.

    Returns how many tokens were cached.
    """
    manager, pool = executor.manager, executor.pools[0]
    with manager.acquire(tokens, now=executor.clock(), keep=0, load=load) as lease:
        executor.wait(lease)
        # A load that failed took its room along.
        lease.reserve(len(tokens) - lease.matched, now=executor.clock())
        executor.wait(lease)
        size, found = manager.block_tokens, lease.matched
        wanted = kv(tokens, manager.model, size)
        known = np.ones(len(tokens), dtype=bool)
        known[lease.plan.recompute()] = False
        known[found:] = False
        known, wanted = torch.from_numpy(known).to(pool.device), wanted.to(pool.device)
        at = torch.arange(len(tokens), device=pool.device)
        for layer, units in enumerate(pool.table(lease.slots(0))):
            rows, offsets = units[at // size], at % size
            got = torch.stack(pool.gather(rows[known], offsets[known]))
            assert torch.equal(got, wanted[layer][:, known]), f"wrong bytes in layer {layer}"
            pool.scatter(rows[~known], offsets[~known], *wanted[layer][:, ~known])
        lease.commit(tokens[found:], now=executor.clock())
    executor.poll()
    return int(known.sum())


def fill(folder, prompts, **settings):
    """A folder that keeps these prompts and nothing else."""
    with serving(folder, **settings) as executor:
        for tokens in prompts:
            ask(executor, tokens)
        executor.save()


def stores(folder):
    """The stores' own folders."""
    return [store for store, _ in DiskStore.stores(folder)]


def rows(folder):
    """Slot and key of every block of the only store."""
    (store,) = stores(folder)
    return [row[:2] for row in DiskStore.inspect(store).blocks(WALL)]


def place(folder, prompts):
    """The slot of each prompt of one block."""
    with serving(folder) as executor:
        executor.restore()
        found = [executor.manager.lookup(tokens, now=0, keep=0) for tokens in prompts]
        return [int(match.blocks[0].copies[0].slots[0]) for match in found]


class Damage:
    """Faults planted in the files of the only store of a folder."""

    def __init__(self, folder):
        (self.store,) = stores(folder)
        seen = DiskStore.inspect(self.store)
        self.segment, self.manifest = self.store / "segment-00000", self.store / "manifest"
        self.slot_bytes, self.stride = seen.slot_bytes, -(-seen.layer_bytes // PAGE) * PAGE
        self.headers = seen.slot_bytes - seen.layers * self.stride
        self.keys = {row[0]: row[1] for row in seen.blocks(WALL)}

    def _write(self, at, data):
        with self.segment.open("r+b") as file:
            file.seek(at)
            file.write(data)

    def _slot(self, slot):
        return self.segment.read_bytes()[slot * self.slot_bytes :][: self.slot_bytes]

    def flip(self, slot, layer, bit=3):
        """One bit of a layer."""
        at = slot * self.slot_bytes + self.headers + layer * self.stride + bit // 8
        with self.segment.open("rb") as file:
            file.seek(at)
            old = file.read(1)[0]
        self._write(at, bytes([old ^ 1 << bit % 8]))

    def blank(self, slot):
        """Both header pages zeroed."""
        self._write(slot * self.slot_bytes, bytes(self.headers))

    def swap(self, one, other):
        """Two slots exchanged, headers and all."""
        mine, theirs = self._slot(one), self._slot(other)
        self._write(one * self.slot_bytes, theirs)
        self._write(other * self.slot_bytes, mine)

    def cut(self):
        """The segment ends inside its last slot, which is reported."""
        last = max(self.keys)
        with self.segment.open("r+b") as file:
            file.truncate(last * self.slot_bytes + self.headers + self.stride)
        return last

    def frame(self, slot):
        """One bit of the slot's frame in the manifest."""
        data = bytearray(self.manifest.read_bytes())
        at = data.find(self.keys[slot])
        while bytes(data[at - 32 : at - 28]) != b"kvF1":  # a child's record names its parent
            at = data.find(self.keys[slot], at + 1)
        data[at + 40] ^= 4
        self.manifest.write_bytes(data)


def plant(folder):
    """Five faults in a folder of at least six blocks of one-block prompts; the slots they hit."""
    damage = Damage(folder)
    slots = sorted(damage.keys)
    flipped, blanked, one, other, framed = slots[:5]
    damage.flip(flipped, layer=2)
    damage.blank(blanked)
    damage.swap(one, other)
    damage.frame(framed)
    return {
        "flipped": {flipped},
        "blanked": {blanked},
        "swapped": {one, other},
        "unframed": {framed},
        "cut": {damage.cut()},
    }
