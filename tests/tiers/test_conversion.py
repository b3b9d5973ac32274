"""Pools in different formats: results, costs, and refusals.

The bounds are those of the formats. A number that is rounded to p bits after the point is off by
at most 2^-(p+1) of itself; a code of int8 by half a scale, which is a 127th of the largest number
that shares it; fp8 has 3 bits after the point, and below 2^-6 (of 448) steps of 2^-9. K in int4 is
off by half of a 15th of the spread of its channel in the block, and the rounding of the least
number; V by an eighth of the largest number of its head.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvtrie import BlockManager, Lane, ModelShape, Tier
from kvtrie.errors import ConfigError, KvtrieError
from kvtrie.kernels import gather
from kvtrie.model.layout import Layout
from kvtrie.tiers import DiskStorage, Pool, conversion, open_pools

SHAPE = ModelShape(layers=3, kv_heads=2, head_dim=32, fingerprint="converted")
SIZE = 8
FORMATS = {
    "float16": Layout(dtype="float16"),
    "bfloat16": Layout(dtype="bfloat16"),
    "fp8 by token": Layout(dtype="float8_e4m3fn", scales="token"),
    "fp8 by group": Layout(dtype="float8_e4m3fn", scales="group"),
    "int8 by token": Layout(dtype="int8", scales="token"),
    "int8 by group": Layout(dtype="int8", scales="group"),
    "int8 in pages": Layout(dtype="int8", scales="group", alignment=4096),
    "int4": Layout(dtype="int4", scales="channel"),
    "int4 in pages": Layout(dtype="int4", scales="channel", alignment=4096),
}
PAGED = [name for name, layout in FORMATS.items() if not layout.packed]


def bound(layout, x):
    """The most that each number of `x`, `(…, heads, dim)`, may be off by after a round trip."""
    if layout.scales == "none":
        digits = {"float16": 10, "bfloat16": 7}[layout.dtype]
        return x.abs() * 2.0 ** -(digits + 1) + 2.0**-25
    if layout.packed:
        keys = x[0].unflatten(0, (-1, SIZE))
        spread = keys.amax(1, keepdim=True) - keys.amin(1, keepdim=True)
        off = (spread / 15 * 0.51 + keys.abs().amax(1, keepdim=True) * 2.0**-10).expand_as(keys)
        return torch.stack(
            (off.flatten(0, 1), (x[1].abs().amax(-1, keepdim=True) / 7.9).expand_as(x[1]))
        )
    over = (-1,) if layout.scales == "group" else (-2, -1)
    largest = x.abs().amax(dim=over, keepdim=True)
    if layout.dtype == "int8":
        return (largest / 127 / 2 * 1.001).expand_as(x)
    return torch.maximum(x.abs() * 2.0**-4, largest / 448 * 2.0**-10) * 1.001


def filled(model, blocks, layout=None, *, seed=0, **more):
    """A pool with random numbers of many sizes."""
    pool = Pool(model, blocks, SIZE, layout=layout, **more)
    generator = torch.Generator().manual_seed(seed)
    for rows in {id(each): each for each in (pool.keys, pool.values)}.values():
        sizes = torch.randn(len(rows), 1, 1, generator=generator).exp()
        rows.copy_(torch.randn(rows.shape, generator=generator) * sizes)
    return pool


def numbers(pool, units):
    """K and V of some units, `(2, units × tokens, heads, dim)`."""
    parts = [pool.view(int(unit)) for unit in units]
    return torch.stack([torch.cat(side) for side in zip(*parts, strict=True)]).float()


def ways():
    """Units on both sides: scattered, of both forms of slots."""
    return np.array([4, 0, 9, 7, 3, 11]), np.array([1, 2, 3, 10, 8, 5])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("piece", [conversion.PIECE_BYTES, 1])
def test_a_round_trip_stays_within_the_format(name, dtype, piece, monkeypatch):
    monkeypatch.setattr(conversion, "PIECE_BYTES", piece)
    model, layout = replace(SHAPE, dtype=dtype), FORMATS[name]
    above = filled(model, 4, Layout(dtype=dtype, alignment=layout.alignment))
    below = Pool(model, 4, SIZE, layout=layout)
    back = Pool(model, 4, SIZE, layout=above.layout)
    source_units, target_units = ways()
    below.copy_from(above, source_units, target_units)
    back.copy_from(below, target_units, source_units)
    want, got = numbers(above, source_units), numbers(back, source_units)
    slack = want.abs() * 2.0**-8 if dtype == "bfloat16" else 0  # rounded once more on its way up
    if layout.dtype == dtype:
        assert torch.equal(got, want)
    assert ((got - want).abs() <= bound(layout, want) + slack).all()
    others = np.setdiff1d(np.arange(12), source_units)
    assert not numbers(back, others).any()


@pytest.mark.parametrize("name", FORMATS)
def test_what_has_been_rounded_once_comes_back_bit_for_bit(name):
    """Demoted again after a load, a block keeps its numbers: they do not drift."""
    layout = FORMATS[name]
    above = filled(SHAPE, 4, Layout(alignment=layout.alignment))
    below = Pool(SHAPE, 4, SIZE, layout=layout)
    units = np.arange(12)
    below.copy_from(above, units, units)
    above.copy_from(below, units, units)
    once = numbers(above, units)
    below.copy_from(above, units, units)
    above.copy_from(below, units, units)
    twice = numbers(above, units)
    if layout.scales == "none":
        assert torch.equal(twice, once)
    # A scale is found again from the largest number, to the last bit or next to it; one in fp16
    # from the spread of a channel.
    rtol, atol = (2.0**-10, 2.0**-10 * float(once.abs().max())) if layout.packed else (3e-7, 0)
    assert torch.allclose(twice, once, rtol=rtol, atol=atol)


@pytest.mark.parametrize("name", PAGED)
def test_a_pool_has_the_values_of_its_pages(name):
    layout = FORMATS[name]
    above = filled(SHAPE, 4, Layout(alignment=layout.alignment))
    below = Pool(SHAPE, 4, SIZE, layout=layout)
    source_units, target_units = ways()
    below.copy_from(above, source_units, target_units)
    slots = torch.from_numpy((target_units[:, None] * SIZE + np.arange(SIZE)).reshape(-1))
    read = torch.empty(2, len(slots), 2, 32)
    gather(below.pages, slots, read[0], read[1])
    want = numbers(above, source_units)
    assert ((read - want).abs() <= bound(layout, want)).all()


def test_k_and_v_apart_and_latent_vectors_convert_too():
    split = Layout(kv="split")
    latent = ModelShape(layers=3, kv_heads=1, head_dim=576, latent=True), Layout(latent=True)
    by_token, packed = ("int8", "token", 127 * 2), ("int4", "channel", 7.9)
    for (model, plain), (dtype, scales, steps) in (
        ((replace(SHAPE, v_head_dim=16), split), by_token),
        ((SHAPE, split), by_token),
        (latent, by_token),
        ((replace(SHAPE, v_head_dim=16), split), packed),
        ((SHAPE, split), packed),
    ):
        layout = replace(plain, dtype=dtype, scales=scales)
        above, below = filled(model, 4, plain), Pool(model, 4, SIZE, layout=layout)
        before = [plane.clone() for plane in above.planes]
        units = np.arange(12)
        below.copy_from(above, units, units)
        for plane in above.planes:
            plane.zero_()
        above.copy_from(below, units, units)
        for plane, old in zip(above.planes, before, strict=True):
            want, got = old.view(torch.float32), plane.view(torch.float32)
            assert (got - want).abs().max() <= want.abs().max() / steps * 1.001


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("float16", 2 * SIZE * 2 * 32 * 2),
        ("fp8 by token", 2 * SIZE * (2 * 32 + 4)),
        ("int8 by group", 2 * SIZE * 2 * (32 + 4)),
        ("int8 in pages", 4096),
        ("int4", 2 * SIZE * 2 * 32 // 2 + 2 * 32 * 4 + SIZE * 2 * 2),
        ("int4 in pages", 4096),
    ],
)
def test_a_block_takes_what_its_format_takes(name, size):
    tier = Tier("host", bytes=100 * 3 * size, layout=FORMATS[name])
    assert tier.room(SHAPE, SIZE) == 100
    pool = Pool.of_tier(SHAPE, tier, SIZE, device="cpu", pinned=False)
    assert sum(plane.nbytes for plane in pool.planes) == 100 * 3 * size
    tiers = [Tier("gpu", blocks=4), tier]
    manager = BlockManager(SHAPE, tiers, block_tokens=SIZE)
    assert manager.stats().tiers["host"].slots == 100


def test_a_lane_carries_more_blocks_of_a_smaller_format():
    lane = Lane("down", 8e9)
    plain = Tier("host", blocks=4, read=lane, store=lane)
    small = replace(plain, layout=FORMATS["int8 by group"])
    assert plain.paced(SHAPE, SIZE) == (lane, lane)
    assert small.lanes() == (lane, lane)
    assert small.pace(lane, SHAPE, SIZE).bytes_per_s == 8e9 * 32 * 4 / (32 + 4)
    ends = {}
    for tier in (plain, small):
        manager = BlockManager(SHAPE, [Tier("gpu", blocks=4), tier], block_tokens=SIZE)
        ends[tier] = manager.transmit("down", SIZE, now=0, layers=3).end
    assert ends[small] == pytest.approx(ends[plain] * (32 + 4) / (32 * 4), abs=1)


REFUSED = {
    "codes without scales": (
        [Layout(), Layout(dtype="int8")],
        "(host) cannot exchange KV: cells of torch.int8 and scales by 'none' do not go together",
    ),
    "scales without codes": (
        [Layout(), Layout(dtype="float16", scales="group")],
        "cells of torch.float16 and scales by 'group' do not go together",
    ),
    "scales that nobody gives": (
        [Layout(), Layout(dtype="int8", scales="head")],
        "scales are by 'head', 'token' or 'group' wanted: a tier computes no other scales",
    ),
    "a format that kernels do not know": (
        [Layout(), Layout(dtype="float8_e5m2", scales="group")],
        "not torch.float8_e5m2",
    ),
    "more than the format": (
        [Layout(), Layout(dtype="float16", kv="split")],
        "tier 0 (gpu) and tier 1 (host) differ: kv joined and split",
    ),
    "a first tier in another format": (
        [Layout(dtype="int8", scales="group"), Layout()],
        "the model and tier 0 (gpu) differ: dtype float32 and int8, scales none and group",
    ),
    "a disk that does not store what the host holds": (
        [Layout(), FORMATS["int8 by group"], Layout()],
        "dtype int8 and float32, scales group and none; a number takes 8 and 32 bits",
    ),
    "a disk with other scales": (
        [Layout(), FORMATS["int8 by group"], FORMATS["int8 by token"]],
        "tier 1 (host) and tier 2 (disk) differ: scales group and token",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_converted_is_refused_before_anything_is_opened(what, tmp_path):
    layouts, message = REFUSED[what]
    folder = tmp_path / "kv"
    kinds = ("gpu", "host", "disk")
    tiers = [
        Tier(kind, blocks=4, layout=layout, path=str(folder) if kind == "disk" else None)
        for kind, layout in zip(kinds, layouts, strict=False)
    ]
    with pytest.raises(ConfigError) as refused:
        open_pools(SHAPE, tiers, SIZE)
    assert message in str(refused.value)
    assert not folder.exists()


def test_heads_that_kernels_cannot_serve_are_refused():
    small = replace(SHAPE, head_dim=12)
    tiers = [Tier("gpu", blocks=4), Tier("host", blocks=4, layout=FORMATS["int8 by group"])]
    with pytest.raises(ConfigError, match="a head of 12 numbers is no multiple of 8"):
        open_pools(small, tiers, SIZE)
    tiers = [tiers[0], Tier("host", blocks=4, layout=FORMATS["int4"])]
    with pytest.raises(ConfigError, match="a head of 40 numbers is no multiple of 16"):
        open_pools(replace(SHAPE, head_dim=40), tiers, SIZE)


def test_a_quantised_pool_gives_no_raw_numbers():
    pool = Pool(SHAPE, 4, SIZE, layout=FORMATS["int8 by group"])
    with pytest.raises(ConfigError, match="holds codes of int8 with scales by 'group'"):
        pool.view(0)
    assert pool.device.type == "cpu"
    packed = Pool(SHAPE, 4, SIZE, layout=FORMATS["int4"])
    with pytest.raises(ConfigError, match="int4 is read as whole blocks"):
        packed.pages  # noqa: B018 - refused


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"scales": "group"}, "int4 and scales by channel go together"),
        ({"dtype": "int8"}, "int4 and scales by channel go together"),
        ({"latent": True}, "int4 is for K and V in the order"),
        ({"strides": (1, 1, 1, 1, 1, 1)}, "int4 is for K and V in the order"),
    ],
)
def test_a_layout_of_int4_that_cannot_be_is_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        replace(FORMATS["int4"], **fields)


def test_int4_goes_to_host_and_disk_and_back(tmp_path):
    """A disk takes the bytes of the host; a read of a damaged scale fails."""
    above = filled(SHAPE, 4)
    host = Pool(SHAPE, 4, SIZE, layout=FORMATS["int4"])
    units = np.arange(3)
    host.copy_from(above, units, units)
    disk = Tier("disk", blocks=4, path=str(tmp_path / "kv"), layout=FORMATS["int4"])
    storage = DiskStorage.of_tier(SHAPE, disk, SIZE)
    manager = BlockManager(SHAPE, [Tier("gpu", blocks=4), disk], block_tokens=SIZE)
    tokens = np.arange(SIZE, dtype=np.uint32)
    with manager.acquire(tokens, now=0, keep=0) as lease:
        lease.commit(tokens, now=0)
    manager.flush(now=1)
    moves = manager.moves()
    key, want = moves.key[0].tobytes(), host.planes[0][:3].clone()
    storage.write(key, 0, (0, 3), host.planes[0][:3], moves.label[0])
    host.planes[0].zero_()
    storage.read(key, 0, (0, 3), host.planes[0][:3])
    assert torch.equal(host.planes[0][:3], want)
    storage.close()
    part = FORMATS["int4"].packed_parts(SIZE, 2, 32)[0]
    scales = want[0, part.scales_at : part.scales_at + 64].numpy().tobytes()
    [file] = [
        one for one in (tmp_path / "kv").rglob("*") if one.is_file() and scales in one.read_bytes()
    ]
    data = bytearray(file.read_bytes())
    data[data.index(scales) + 5] ^= 0x40
    file.write_bytes(data)
    again = DiskStorage.of_tier(SHAPE, disk, SIZE)
    with pytest.raises(KvtrieError):
        again.read(key, 0, (0, 3), host.planes[0][:3])
    again.close()
