"""Kernels of attention backends: known ones are used, others and KV that is not plain refused."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from vllm_engine import served

from kvtrie import ModelShape
from kvtrie.engines.vllm.kv_writer import known_views, writer_of
from kvtrie.errors import ConfigError

MODEL = served("ab", ranks=1, stages=1, replicated=False)
SIDE = (MODEL.block_tokens, MODEL.shape.rank_heads, MODEL.shape.head_dim)


def config(backend):
    """vLLM's configuration of layers whose kernel writes K and then V of a block."""

    def update(_, keys, values, memory, slots):
        blocks = memory.view(len(memory), 2, *SIDE)
        for row, slot in enumerate(slots.tolist()):
            block, token = divmod(slot, SIDE[0])
            blocks[block, 0, token], blocks[block, 1, token] = keys[row], values[row]

    layer = SimpleNamespace(
        attn_backend=SimpleNamespace(get_name=lambda: backend),
        impl=SimpleNamespace(do_kv_cache_update=update),
    )
    contexts = {"a": layer, "b": layer}
    return SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=contexts))


def memory():
    size = 2 * SIDE[0] * SIDE[1] * SIDE[2]
    return {name: torch.randn(MODEL.blocks, size) for name in "ab"}


@pytest.mark.parametrize("backend", ["CPU_ATTN", "FLASH_ATTN", "FLASHINFER"])
def test_a_known_backend_shows_its_layout(backend):
    tensors = memory()
    before = tensors["b"].clone()
    views = known_views("int8", MODEL, 0, tensors, writer_of(config(backend)))
    assert torch.equal(tensors["b"], before)
    keys, values = views[1]
    blocks = before.view(MODEL.blocks, 2, *SIDE)
    assert torch.equal(keys.reshape(MODEL.blocks, *SIDE), blocks[:, 0])
    assert torch.equal(values.reshape(MODEL.blocks, *SIDE), blocks[:, 1])


def test_another_backend_is_refused():
    with pytest.raises(ConfigError, match="attention backend FLEX_ATTENTION is not known"):
        known_views("int8", MODEL, 0, memory(), writer_of(config("FLEX_ATTENTION")))
    with pytest.raises(ConfigError, match="wants the attention backend's kernel"):
        known_views("int8", MODEL, 0, memory(), None)


@pytest.mark.parametrize(
    ("shape", "what"),
    [
        (ModelShape(2, 1, 32, latent=True), "latent vectors or codes in float32"),
        (ModelShape(2, 2, 8, dtype="uint8"), "K and V in uint8"),
    ],
)
def test_kv_that_is_not_plain_is_refused(shape, what):
    model = replace(MODEL, shape=shape)
    with pytest.raises(ConfigError) as refused:
        known_views("int8", model, 0, memory(), writer_of(config("CPU_ATTN")))
    assert what in str(refused.value)
    assert "leave format out" in str(refused.value)
