"""RoPE of a selective cache is that of one pass over the whole sequence."""

from __future__ import annotations

import random

import pytest
import torch
import transformers
from decoders import make, tokens
from sight import passes

from kvtrie.errors import ConfigError
from kvtrie.selective import CacheSettings, SelectiveCache, generate


def test_yarn_is_what_a_model_set_to_it_computes():
    model, scaled = (
        make(max_position_embeddings=64),
        make(
            max_position_embeddings=64,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 200 / 64,
                "original_max_position_embeddings": 64,
            },
        ),
    )
    ids = tokens(10, 1, 200)
    with torch.no_grad():
        truth, static = scaled(ids).logits[:, -1], model(ids).logits[:, -1]
    settings = CacheSettings("dense-default", cache_length=200)
    with SelectiveCache(model, settings) as cache:
        assert cache.steps(200) == [200]
        assert cache.rope_factor == 200 / 64
        assert (cache.read(ids[:, :150]) - truth).abs().max() > 1e-2
        assert (cache.read(ids[:, 150:]) - truth).abs().max() < 1e-4
    with SelectiveCache(model, settings, yarn_rope=False) as cache:
        assert (cache.read(ids) - static).abs().max() < 1e-4
    with SelectiveCache(scaled, settings) as cache:  # the model's scaling stays
        assert (cache.read(ids) - truth).abs().max() < 1e-4
    with torch.no_grad():
        assert torch.equal(model(ids).logits[:, -1], static)


LENGTH_ROPE = {
    "dynamic": {"factor": 4.0},
    "longrope": {
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "short_factor": [1.0] * 8,
        "long_factor": [1.0, 2.0, 6.0, 16.0] * 2,
    },
}


def with_length_rope(kind):
    rope = {"rope_type": kind, "rope_theta": 10000.0, **LENGTH_ROPE[kind]}
    return make(max_position_embeddings=64 if kind == "dynamic" else 512, rope_parameters=rope)


@pytest.mark.parametrize("total", [60, 150])
@pytest.mark.parametrize("kind", LENGTH_ROPE)
@pytest.mark.parametrize("yarn_rope", [True, False])
def test_rope_by_length_in_steps_is_that_of_one_pass(kind, total, yarn_rope):
    model = with_length_rope(kind)
    ids = tokens(10, 1, total)
    with torch.no_grad():
        truth = with_length_rope(kind)(ids).logits
        model(tokens(11, 1, 200))  # dynamic RoPE keeps the longest length that it has met
    settings = CacheSettings("dense-default", cache_length=200)
    with SelectiveCache(model, settings, yarn_rope=yarn_rope) as cache:
        cache.steps(total)
        found = passes(model, cache, ids[:, :7], random.Random(1))
        found = torch.cat((found, passes(model, cache, ids, random.Random(2))), dim=1)
    assert (found - truth).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("kind", "total", "reach"), [("dynamic", 50, 63), ("dynamic", 90, 90), ("longrope", 50, 64)]
)
def test_a_pass_beyond_the_length_that_rope_was_fixed_for_is_refused(kind, total, reach):
    model = with_length_rope(kind)
    ids = tokens(10, 1, 150)
    settings = CacheSettings("dense-default", cache_length=200)
    with SelectiveCache(model, settings) as cache:
        cache.steps(total)
        cache.read(ids[:, :reach])
        with pytest.raises(ConfigError, match=rf"up to {reach} tokens, and a pass reaches 120"):
            cache.read(ids[:, reach:120])
        with pytest.raises(ConfigError, match="depends on the length"):
            cache.steps(120)
        assert cache.get_seq_length() == reach
        cache.reset()
        assert cache.read(ids[:, :120]).isfinite().all()


@pytest.mark.parametrize("kind", LENGTH_ROPE)
def test_generate_rotates_for_prompt_and_answer(kind):
    model = with_length_rope(kind)
    ids = tokens(10, 1, 50)
    settings = CacheSettings("dense-default", cache_length=200)
    given = {"max_new_tokens": 40, "min_new_tokens": 40, "do_sample": False}
    made = generate(model, ids, settings, **given)
    with torch.no_grad():
        truth = with_length_rope(kind)(made).logits
    # One pass over all tokens says each of them; the last one is never read.
    assert torch.equal(truth[0, 49:-1].argmax(-1), made[0, 50:])


def test_generate_of_a_model_that_leaves_its_cache_is_refused():
    """Phi-3 reads all tokens again, without the cache, where its rotation would change."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "vocab_size": 211}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, **LENGTH_ROPE["longrope"]}
    config = transformers.Phi3Config(
        **sizes,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        original_max_position_embeddings=64,
        rope_parameters={**rope, "partial_rotary_factor": 1.0},
        pad_token_id=0,
    )
    model = transformers.Phi3ForCausalLM(config).eval()
    settings = CacheSettings("dense-default", cache_length=200)
    given = {"min_new_tokens": 10, "max_new_tokens": 10, "do_sample": False}
    assert generate(model, tokens(10, 1, 100), settings, **given).shape == (1, 110)
    with pytest.raises(ConfigError, match="without the cache that it was given"):
        generate(model, tokens(10, 1, 60), settings, **given)
