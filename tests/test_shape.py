"""`ModelShape`: bytes of its blocks, shapes of configurations, and the identity of a model's KV."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from kvtrie import (
    BlockManager,
    ConfigError,
    LayerGroup,
    ModelShape,
    Tier,
)

MODEL = ModelShape(layers=4, kv_heads=2, head_dim=8, fingerprint="settings")

GPU = Tier("gpu", blocks=4)


def test_sizes_follow_the_shape():
    assert MODEL.layer_bytes(16) == 16 * 2 * (8 + 8) * 4
    assert MODEL.block_bytes(16) == 4 * MODEL.layer_bytes(16)
    wide = ModelShape(4, 2, 8, dtype="bfloat16", v_head_dim=4)
    assert wide.layer_bytes(1) == 2 * (8 + 4) * 2
    assert ModelShape(4, 2, 8, tp=2).layer_bytes(16) == MODEL.layer_bytes(16) // 2
    assert ModelShape(4, 2, 8, tp=4).layer_bytes(16) == MODEL.layer_bytes(16) // 2
    assert ModelShape(4, 1, 576, latent=True).layer_bytes(1) == 576 * 4
    with pytest.raises(ConfigError, match="block_tokens is 0"):
        MODEL.layer_bytes(0)


def config(**change):
    return SimpleNamespace(
        **{
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "hidden_size": 64,
            "dtype": "torch.bfloat16",
        }
        | change
    )


def test_a_configuration_becomes_a_shape():
    shape = ModelShape.from_config(config(), fingerprint="w")
    assert shape == ModelShape(
        4, 2, 8, "bfloat16", query_heads=8, hidden=64, groups=(), fingerprint="w"
    )
    assert ModelShape.from_config(config(num_key_value_heads=None)).kv_heads == 8
    assert ModelShape.from_config(config(head_dim=32)).head_dim == 32
    assert ModelShape.from_config(config(), dtype="float16", tp=2).dtype == "float16"
    assert ModelShape.from_config(config(dtype=None)).dtype == "float32"
    whole = SimpleNamespace(get_text_config=lambda decoder: config(num_hidden_layers=2 + decoder))
    assert ModelShape.from_config(whole).layers == 3


def test_windows_become_groups():
    types = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    mixed = ModelShape.from_config(config(layer_types=types, sliding_window=128))
    assert mixed.groups == (
        LayerGroup((1, 3)),
        LayerGroup((0, 2), kind="sliding", window=128),
    )
    every = ModelShape.from_config(config(sliding_window=64))
    assert every.groups == (LayerGroup((0, 1, 2, 3), kind="sliding", window=64),)
    unused = config(sliding_window=64, use_sliding_window=False)
    assert ModelShape.from_config(unused).groups == ()
    chunked = config(layer_types=["chunked_attention"] * 4, attention_chunk_size=256)
    assert ModelShape.from_config(chunked).groups[0].window == 256
    BlockManager(mixed, [GPU])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["linear_attention"] * 4}, "linear_attention"),
        ({"layer_types": ["full_attention"] * 3}, "3 layers of 4"),
        ({"kv_lora_rank": 512}, "kv_lora_rank=512"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder=True"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers=2"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"hidden_size": 63}, "63 is no multiple of 8"),
        ({"dtype": "torch.complex64"}, "complex64"),
    ],
)
def test_a_structure_that_would_be_served_wrongly_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        ModelShape.from_config(config(**change))


def test_identities_of_different_models_differ():
    shapes = [
        MODEL,
        dataclasses.replace(MODEL, fingerprint="other"),
        dataclasses.replace(MODEL, dtype="float16"),
        dataclasses.replace(MODEL, v_head_dim=4),
        dataclasses.replace(MODEL, tp=2),
        dataclasses.replace(MODEL, latent=True),
        dataclasses.replace(MODEL, layers=5),
    ]
    assert len({shape.identity() for shape in shapes}) == len(shapes)
    assert dataclasses.replace(MODEL, hidden=9).identity() == MODEL.identity()
