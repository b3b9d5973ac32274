"""Answers of `generate` over a selective cache are those of the model's own."""

from __future__ import annotations

import pytest
import torch
from decoders import answer, make, tokens

from kvtrie.errors import ConfigError
from kvtrie.selective import CacheSettings, generate


@pytest.mark.parametrize(
    "more", [{}, {"num_beams": 3}, {"num_return_sequences": 2, "num_beams": 2}]
)
def test_generate_says_what_the_model_says(llama, more):
    ids = tokens(5, 2, 30)
    settings = CacheSettings("h2o-default", cache_length=64)
    mine = generate(llama, ids, settings, max_new_tokens=8, do_sample=False, **more)
    assert torch.equal(mine, answer(llama, ids, **more))


def test_generate_takes_padded_batches(llama):
    ids = tokens(6, 2, 30)
    ids[0, :9] = 0
    mask = (torch.arange(30) >= torch.tensor([[9], [0]])).long()
    given = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    settings = CacheSettings("snapkv-default", cache_length=64)
    assert torch.equal(generate(llama, ids, settings, **given), answer(llama, ids, **given))
    short = generate(llama, ids, CacheSettings("h2o-default", cache_length=16), **given)
    assert short.shape == (2, 36)


def test_a_long_prompt_with_beams_goes_on(llama):
    ids = tokens(7, 1, 200)
    settings = CacheSettings("h2o-int8", cache_length=32, chunk_size=16)
    assert generate(llama, ids, settings, max_new_tokens=5, num_beams=3).shape == (1, 205)


def test_generate_is_right_whatever_a_configuration_says_of_caches():
    model, ids = make(), tokens(5, 1, 30)
    truth = answer(model, ids)
    model.generation_config.use_cache = False
    settings = CacheSettings("dense-default", cache_length=64, chunk_size=8)
    given = {"max_new_tokens": 8, "do_sample": False}
    assert torch.equal(generate(model, ids, settings, **given), truth)
    model.generation_config.prompt_lookup_num_tokens = 3
    with pytest.raises(ConfigError, match="leave prompt_lookup_num_tokens out"):
        generate(model, ids, settings, **given)
