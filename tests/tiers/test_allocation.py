"""Host memory that a device copies from: the bytes of the tier are pinned, until the pool ends."""

from __future__ import annotations

import gc

import pytest
import torch

from kvtrie.errors import ConfigError
from kvtrie.model.layout import Layout
from kvtrie.model.shape import ModelShape
from kvtrie.settings.tier import Tier
from kvtrie.tiers import Pool

SHAPES = {
    "3 heads of 80": ModelShape(layers=5, kv_heads=3, head_dim=80, fingerprint="x"),
    "latent": ModelShape(layers=3, kv_heads=1, head_dim=576, latent=True, fingerprint="x"),
}
SIZE = 3_000_000  # a power of two holds 4 194 304


class Runtime:
    """Stands in for CUDA's runtime; bytes that are registered by address."""

    def __init__(self, room=10):
        self.pinned, self.room = {}, room

    def cudaHostRegister(self, address, size, _):  # noqa: N802 - CUDA's name
        if len(self.pinned) == self.room:
            return 2
        self.pinned[address] = size
        return 0

    def cudaHostUnregister(self, address):  # noqa: N802 - CUDA's name
        del self.pinned[address]


@pytest.fixture
def runtime(monkeypatch):
    made = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    return made


def open_pool(shape, layout=None):
    tier = Tier("host", bytes=SIZE, layout=layout)
    return Pool.of_tier(shape, tier, 16, device="cpu", pinned=True)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_as_many_bytes_are_pinned_as_the_blocks_of_the_tier_take(runtime, shape):
    pool = open_pool(shape)
    assert runtime.pinned == {plane.data_ptr(): plane.nbytes for plane in pool.planes}
    assert SIZE - shape.block_bytes(16) < sum(runtime.pinned.values()) == pool.nbytes <= SIZE
    pool.close()
    pool.close()
    assert not runtime.pinned


def test_a_pool_that_is_not_closed_is_unpinned_before_its_memory_is_gone(runtime):
    pool = open_pool(SHAPES["latent"], Layout(kv="joined"))
    assert runtime.pinned
    del pool
    gc.collect()
    assert not runtime.pinned


def test_memory_that_cannot_be_pinned_is_refused_and_none_stays_pinned(runtime):
    runtime.room = 1
    with pytest.raises(ConfigError, match=r"\d+ bytes of host memory cannot be pinned: 2"):
        open_pool(SHAPES["3 heads of 80"], Layout(kv="split"))
    assert not runtime.pinned
