"""A store in a dictionary for tests, a clock that they set, and blocks with labels to put there."""

from __future__ import annotations

import time

import numpy as np
import torch

from kvtrie import BlockManager, ModelShape, Tier
from kvtrie.tiers.remote import RemoteStorage, Result

SHAPE = ModelShape(layers=3, kv_heads=2, head_dim=4, fingerprint="remote")
SIZE = 4
NS = 1_000_000_000


class Clock:
    """A clock that a test sets."""

    def __init__(self):
        self.now = 10 * NS

    def __call__(self):
        return self.now


class Shelf:
    """A store in a dict that fails as a test says."""

    def __init__(self):
        self.values = {}
        self.asked = []
        self.fails = None

    def _each(self, names, do):
        self.asked.append(list(names))
        if self.fails is not None:
            return [Result(self.fails, "as the test says")] * len(names)
        return [do(at, name) for at, name in enumerate(names)]

    def exists_many(self, names, deadline):  # noqa: ARG002
        return self._each(names, lambda _, name: Result("ok" if name in self.values else "missing"))

    def get_many(self, rows, deadline):  # noqa: ARG002
        def get(at, name):
            if name not in self.values:
                return Result("missing")
            value, row = np.frombuffer(self.values[name], np.uint8), rows[at]
            size = row.memory.shape[1]
            start = len(row.header) + row.layers[0] * size
            row.header[:] = value[: len(row.header)]
            row.memory[:] = value[start : start + row.memory.nbytes].reshape(row.memory.shape)
            return Result("ok")

        return self._each([row.name for row in rows], get)

    def put_many(self, rows, deadline):  # noqa: ARG002
        def put(at, name):
            self.values.setdefault(name, rows[at].header + rows[at].memory.tobytes())
            return Result("ok")

        return self._each([row.name for row in rows], put)

    def remove_many(self, names, deadline):  # noqa: ARG002
        return self._each(names, lambda _, name: Result("ok", str(self.values.pop(name, b"")[:0])))

    def close(self):
        self.values = None


def storage_of(store, clock=time.monotonic_ns, model=SHAPE, **settings):
    return RemoteStorage("folder:/nowhere", model, SIZE, store=store, clock=clock, **settings)


def labelled(tokens, model=SHAPE, scope=None):
    """Keys of a sequence, and the labels with which a manager writes its blocks."""
    tiers = [Tier("gpu", blocks=8, write="through"), Tier("host", blocks=8), Tier("disk", blocks=8)]
    manager = BlockManager(model, tiers, block_tokens=SIZE)
    manager.mark(tokens, "host", present=True, now=1, scope=scope)
    keys = [bytes(key) for key in manager.keys(tokens, scope=scope)]
    labels = {row_key: row[0] for row_key, row in _index(manager)}
    return keys, [labels[key] for key in keys]


def _index(manager):
    index = manager.index("host", now=1)
    return zip(map(bytes, index.key), index, strict=True)


def kv(seed, layers=3):
    generator = torch.Generator().manual_seed(seed)
    size = (layers, SHAPE.layer_bytes(SIZE))
    return torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)


TOKENS = list(range(8))
