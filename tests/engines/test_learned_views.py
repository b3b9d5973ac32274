"""Views of an engine's blocks that a test pattern has found, against kernels of many layouts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvtrie import ModelShape
from kvtrie.engines.vllm.learned_views import BlockShape, learned_views
from kvtrie.errors import ConfigError
from kvtrie.model.layout import FORMATS, Layout
from kvtrie.tiers import EnginePool, Pool

SHAPE = BlockShape(tokens=32, heads=3, dim=64)
BLOCKS = 4


def interleaved(memory):
    """K and V of a token next to each other, as FlashAttention has them."""
    return memory.view(BLOCKS, 32, 3, 128).split(64, dim=-1)


def head_major(memory):
    """Heads before tokens, as FlashInfer has them."""
    views = memory.view(BLOCKS, 3, 32, 128).split(64, dim=-1)
    return [view.transpose(1, 2) for view in views]


def transposed(memory):
    """K by channel and V by token, as a CPU's vectors want them."""
    values = memory.view(BLOCKS, 3, 64, 64)[:, :, 32:].transpose(1, 2)
    return [memory.as_strided((BLOCKS, 32, 3, 64), (12288, 1, 4096, 32), 0), values]


def pairs(memory):
    """K by pairs of channels, V by pairs of tokens, as tiles of matrix units want them."""
    keys = memory.as_strided((BLOCKS, 32, 3, 32, 2), (12288, 2, 2048, 64, 1), 0)
    values = memory.as_strided((BLOCKS, 16, 2, 3, 64), (12288, 128, 1, 2048, 2), 6144)
    return [keys, values]


LAYOUTS = {
    "interleaved": interleaved,
    "head major": head_major,
    "by channel": transposed,
    "pairs": pairs,
}


def kernel(views):
    """A kernel that writes rows through views `(blocks, tokens…, heads, numbers…)`."""

    def write(keys, values, slots):
        for view, rows in zip(views, (keys, values), strict=True):
            for row, slot in zip(rows, slots.tolist(), strict=True):
                block, token = divmod(slot, SHAPE.tokens)
                at = np.unravel_index(token, tuple(view.shape[1 : view.dim() - row_axes(view)]))
                view[(block, *(int(each) for each in at))] = row.view(view.shape[-row_axes(view) :])

    return write


def row_axes(view):
    """Axes after those of tokens."""
    return 3 if view.shape[-3:] == (3, 32, 2) else 2


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_views_read_rows_in_the_order_of_token_head_and_number(name, dtype):
    memory = torch.randn(BLOCKS * 12288).to(dtype)
    before = memory.clone()
    write = kernel(LAYOUTS[name](memory))
    keys, values = learned_views(memory.view(BLOCKS, -1), 0, SHAPE, write)
    assert torch.equal(memory, before)
    rows = torch.randn(2, 32, 3, 64).to(dtype)
    write(rows[0], rows[1], torch.arange(32) + 64)
    assert torch.equal(keys[2].reshape(SHAPE), rows[0])
    assert torch.equal(values[2].reshape(SHAPE), rows[1])


@pytest.mark.parametrize("name", LAYOUTS)
def test_blocks_go_to_a_host_tier_in_a_format_and_back(name):
    model = ModelShape(layers=2, kv_heads=3, head_dim=64, dtype="bfloat16")
    layers = [torch.zeros(BLOCKS * 12288, dtype=torch.bfloat16) for _ in range(2)]
    writes = [kernel(LAYOUTS[name](memory)) for memory in layers]
    views = [
        learned_views(memory.view(BLOCKS, -1), 0, SHAPE, write)
        for memory, write in zip(layers, writes, strict=True)
    ]
    pool = EnginePool(model, SHAPE.tokens, views)
    rows = torch.randn(2, 2, 32, 3, 64).bfloat16()
    for at, write in enumerate(writes):
        write(rows[at, 0], rows[at, 1], torch.arange(32))
    for format_, error in (("int8", 0.02), ("int4", 0.4)):
        host = Pool(model, BLOCKS, SHAPE.tokens, layout=FORMATS[format_])
        host.copy_from(pool, np.arange(2), np.arange(2) + 2)
        pool.copy_from(host, np.arange(2) + 2, np.arange(2) + 4)
        for at, (keys, values) in enumerate(views):
            read = torch.stack((keys[2].reshape(SHAPE), values[2].reshape(SHAPE)))
            assert 0 < (read - rows[at]).abs().max() < error
    native = Pool(model, BLOCKS, SHAPE.tokens, layout=Layout(dtype="bfloat16"))
    native.copy_from(pool, np.arange(2), np.arange(2))
    assert torch.equal(native.keys[:32], rows[0, 0])


def test_a_kernel_that_rounds_is_refused():
    memory = torch.zeros(BLOCKS, 12288)
    write = kernel(interleaved(memory))
    with pytest.raises(ConfigError, match="has changed numbers of a test pattern"):
        learned_views(memory, 0, SHAPE, lambda k, v, at: write(k // 2, v, at))
    assert not memory.any()


def test_an_order_without_strides_is_refused():
    memory = torch.zeros(BLOCKS, 12288)
    write = kernel(interleaved(memory))
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ConfigError, match="have no strides"):
        learned_views(memory, 0, SHAPE, lambda k, v, at: write(k[..., order], v, at))


def test_blocks_of_another_size_are_refused():
    with pytest.raises(ConfigError, match="a block of 12292 numbers in the engine's memory, 12288"):
        learned_views(torch.zeros(BLOCKS, 12292), 0, SHAPE, lambda *_: None)


def test_blocks_that_differ_from_the_first_are_refused():
    memory = torch.zeros(BLOCKS, 12288)
    one, other = kernel(interleaved(memory)), kernel(head_major(memory))
    with pytest.raises(ConfigError, match="blocks differ in their layout"):
        learned_views(memory, 0, SHAPE, lambda k, v, at: (one if at[0] < 32 else other)(k, v, at))
