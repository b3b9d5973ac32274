"""`Tier`: room in bytes as blocks, and lanes that it has by its kind."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvtrie import (
    BlockManager,
    ConfigError,
    Lane,
    Layout,
    ModelShape,
    Tier,
)
from kvtrie.tiers import Pool

MODEL = ModelShape(layers=4, kv_heads=2, head_dim=8, fingerprint="settings")
SHAPE = ModelShape(layers=3, kv_heads=2, head_dim=4, fingerprint="room")


def test_room_in_bytes_is_rounded_down_to_blocks():
    size = MODEL.block_bytes(16)
    manager = BlockManager(MODEL, [Tier("gpu", bytes=3 * size - 1), Tier("host", bytes=5 * size)])
    tiers = manager.stats().tiers
    assert (tiers["gpu"].slots, tiers["host"].slots) == (2, 5)


def test_a_token_that_stands_for_many_has_the_bytes_of_many():
    tiers = [Tier("gpu", bytes=3 * MODEL.block_bytes(512))]
    manager = BlockManager(MODEL, tiers, block_tokens=1, token_weight=512)
    assert manager.stats().tiers["gpu"].slots == 3
    manager.transmit("gpu read", 2, now=0)
    assert manager.stats().lanes["gpu read"].bytes == MODEL.block_bytes(1024)


def test_lanes_have_defaults_by_kind():
    read, store = Tier("host", blocks=1).lanes()
    assert (
        (read.bytes_per_s, read.latency_ns)
        == (12e9, 10_000)
        == (
            store.bytes_per_s,
            store.latency_ns,
        )
    )
    own = Lane("mine", 5)
    assert Tier("disk", blocks=1, read=own).lanes()[0] is own
    assert [Tier(kind, blocks=1).lanes()[0].bytes_per_s for kind in ("gpu", "disk", "remote")] == [
        2e12,
        2e9,
        1e9,
    ]


@pytest.mark.parametrize("layout", [None, Layout(), Layout(alignment=4096), Layout(kv="split")])
@pytest.mark.parametrize("shape", [SHAPE, replace(SHAPE, kv_heads=4, tp=2)])
def test_room_in_bytes_counts_what_the_layout_takes(layout, shape):
    budget = 100_000
    tier = Tier("host", bytes=budget, layout=layout)
    pool = Pool.of_tier(shape, tier, 8, device="cpu", pinned=False)
    taken = sum(plane.nbytes for plane in pool.planes)
    assert pool.blocks == tier.room(shape, 8)
    assert budget - taken // pool.blocks < taken <= budget


def test_room_that_holds_no_aligned_block_is_refused():
    tier = Tier("host", bytes=3 * 4096 - 1, layout=Layout(alignment=4096))
    assert Tier("host", bytes=3 * 4096 - 1).room(SHAPE, 8) == 7
    with pytest.raises(ConfigError, match="12287 bytes, which is 0 blocks of 12288"):
        tier.room(SHAPE, 8)


def test_a_tier_shows_its_url_without_the_password():
    assert "path='folder:/kv'" in repr(Tier("remote", blocks=1, path="folder:/kv"))
    text = repr(Tier("remote", blocks=1, path="redis://user:hidden@host/0"))
    assert "redis://user:***@host/0" in text
    assert "hidden" not in text
