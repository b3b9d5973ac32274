"""Calls of a back end with values that a test recognises: all that is read is compared."""

from __future__ import annotations

import time

import numpy as np

from kvtrie._kvtrie import ValueFormat
from kvtrie.tiers.remote import Get, Put, RemoteUrl
from kvtrie.tiers.remote.open import open_store

SECONDS = 10**9


def soon(seconds=30.0):
    """A deadline of a call."""
    return time.monotonic_ns() + int(seconds * SECONDS)


def name(at):
    """The name of a value by its number."""
    return bytes([at]) * 32


class StoreCalls:
    """Values of a format by number, and calls that write and read them.

    Args:
        layers: layers of a value.
        layer: bytes of a layer.

    Attributes:
        form: their format.
    """

    def __init__(self, layers, layer):
        self._layers, self._layer = layers, layer
        self.form = ValueFormat(layers=layers, layer_bytes=layer, block_tokens=4, meaning=bytes(32))

    def opened(self, url, form=None):
        """A store at a URL."""
        return open_store(RemoteUrl.parse("url", url), form or self.form)

    def value(self, at):
        """Header and layers of a value."""
        rng = np.random.default_rng(at)
        header = rng.integers(0, 256, self.form.header_bytes, dtype=np.uint8)
        return header.tobytes(), rng.integers(0, 256, (self._layers, self._layer), dtype=np.uint8)

    def put(self, store, *numbers, deadline=None, as_of=None):
        """Outcomes of a write."""
        rows = [Put(name(at), *self.value(at if as_of is None else as_of)) for at in numbers]
        return [one.outcome for one in store.put_many(rows, deadline or soon())]

    def get(self, store, *numbers, layers=None, deadline=None):
        """Outcomes of a read; the bytes of all that are ok are those of their values."""
        lo, hi = layers or (0, self._layers)
        rows = [
            Get(
                name(at),
                (lo, hi),
                np.zeros(self.form.header_bytes, np.uint8),
                np.zeros((hi - lo, self._layer), np.uint8),
            )
            for at in numbers
        ]
        found = [one.outcome for one in store.get_many(rows, deadline or soon())]
        for at, row, outcome in zip(numbers, rows, found, strict=True):
            if outcome == "ok":
                header, memory = self.value(at)
                assert row.header.tobytes() == header
                assert np.array_equal(row.memory, memory[lo:hi])
        return found

    def exists(self, store, *numbers):
        """Outcomes of a question."""
        return [one.outcome for one in store.exists_many([name(at) for at in numbers], soon())]
