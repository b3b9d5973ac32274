"""Blocks of an engine that a pool of another format keeps as they are, in parts."""

import numpy as np
import pytest
import torch

from kvtrie import ModelShape
from kvtrie.errors import ConfigError
from kvtrie.model.layout import FORMATS
from kvtrie.tiers import EnginePool, Pool, engine_pool
from kvtrie.tiers.native_parts import NativeParts

BLOCKS, SIZE, LAYERS, HEADS = 6, 16, 2, 2


def pools(format_, dtype="float32", dim=32):
    """An engine's memory with random numbers, its pool, and one of a host tier."""
    shape = ModelShape(LAYERS, HEADS, dim, dtype)
    torch.manual_seed(0)
    memory = [
        torch.randn(BLOCKS, 2, SIZE, HEADS, dim).to(getattr(torch, dtype)) for _ in range(LAYERS)
    ]
    layout = FORMATS[format_]
    narrow = sum(layout.planes(SIZE, HEADS, dim))
    parts = -(-shape.layer_bytes(SIZE) // narrow)
    return (
        memory,
        NativeParts(shape, SIZE, memory, parts=parts),
        Pool(shape, 40, SIZE, layout=layout),
    )


def units(pool, slots):
    return pool.layer_units(np.asarray(slots), 0)[:, None] + np.arange(LAYERS)


def parts_of(slot, parts):
    return [slot + BLOCKS * (part + 1) for part in range(parts)]


@pytest.mark.parametrize("piece", [1, 1 << 20])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("format_", ["int8", "fp8", "int4"])
def test_parts_give_the_blocks_own_bytes(format_, dtype, piece, monkeypatch):
    monkeypatch.setattr(engine_pool, "PIECE_BYTES", piece)
    memory, engine, host = pools(format_, dtype)
    parts = engine.blocks // BLOCKS - 1
    wide = dtype == "float32"
    assert (
        parts
        == {"int8": 4 if wide else 2, "fp8": 4 if wide else 2, "int4": 7 if wide else 4}[format_]
    )
    before = [each.clone() for each in memory]
    slots = [*parts_of(1, parts), 2, *parts_of(3, parts), *parts_of(5, parts)]
    draw = np.random.default_rng(0)
    source, target = units(engine, slots), units(host, draw.permutation(40)[: len(slots)])
    host.copy_from(engine, source.reshape(-1), target.reshape(-1))
    for each in memory:
        each.zero_()
    order = draw.permutation(len(slots))
    engine.copy_from(host, target[order].reshape(-1), source[order].reshape(-1))
    for each, was in zip(memory, before, strict=True):
        for slot in (1, 3, 5):
            assert torch.equal(each[slot], was[slot])
        assert not torch.equal(each[2], was[2])
        assert (each[2].float() - was[2].float()).abs().max() < 0.5
        assert not each[0].any()
        assert not each[4].any()


def test_parts_may_come_one_after_the_other():
    memory, engine, host = pools("int8")
    parts = engine.blocks // BLOCKS - 1
    before = [each.clone() for each in memory]
    source, target = units(engine, parts_of(4, parts)), units(host, range(parts))
    for part in range(parts):
        host.copy_from(engine, source[part], target[part])
    for each in memory:
        each[4] = 0
    for layer in range(LAYERS):
        for part in reversed(range(parts)):
            assert not torch.equal(memory[layer][4], before[layer][4])
            engine.copy_from(host, target[part, [layer]], source[part, [layer]])
        assert torch.equal(memory[layer], before[layer])


def test_converted_blocks_are_those_of_an_engine_pool():
    memory, engine, host = pools("int4")
    shape = ModelShape(LAYERS, HEADS, 32)
    plain = Pool(shape, 40, SIZE, layout=host.layout)
    same = EnginePool(shape, SIZE, memory)
    source, target = units(engine, [2, 5]), units(host, [7, 1])
    host.copy_from(engine, source.reshape(-1), target.reshape(-1))
    plain.copy_from(same, source.reshape(-1), target.reshape(-1))
    (mine,), (others,) = host.planes, plain.planes
    assert torch.equal(mine[target.reshape(-1)], others[target.reshape(-1)])


def test_a_pool_of_another_shape_is_refused():
    _, engine, _ = pools("int8")
    other = Pool(ModelShape(LAYERS, HEADS, 64), 8, SIZE, layout=FORMATS["int8"])
    source, target = units(engine, parts_of(0, 1)).reshape(-1), units(other, [0]).reshape(-1)
    with pytest.raises(ConfigError, match="head_dim 32 and 64"):
        engine.copy_from(other, target, source)
    with pytest.raises(ConfigError, match="cannot copy between"):
        other.copy_from(engine, source, target)
    with pytest.raises(ConfigError, match="slots 0 to"):
        engine.layer_units(np.array([0, engine.blocks]), 0)
