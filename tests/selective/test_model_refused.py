"""Refusals of a selective cache and of its passes, which leave the model as it was."""

from __future__ import annotations

import pytest
import torch
from decoders import make, opened, tokens

from kvtrie.errors import ConfigError
from kvtrie.selective import CacheSettings, SelectiveCache, generate


def again(model, ids=None, *, name="h2o-default", cache_length=16, **given):
    """A pass after five tokens that a cache has read."""
    with opened(model, name, cache_length=cache_length) as cache, torch.no_grad():
        cache.read(tokens(2, 1, 5))
        return model(tokens(1, 1, 6) if ids is None else ids, past_key_values=cache, **given)


def embedded(model):
    """A pass over embeddings that ask for gradients."""
    given = torch.zeros(1, 4, 64, requires_grad=True)
    with opened(model) as cache:
        return model(inputs_embeds=given, past_key_values=cache)


def lookup(model, **given):
    """transformers' own generate over a cache that has read all but the last token."""
    ids = tokens(3, 1, 10)
    with opened(model, cache_length=64) as cache:
        cache.read(ids[:, :-1])
        return model.generate(ids, past_key_values=cache, max_new_tokens=4, **given)


REFUSED = {
    "a long prompt in the model's own generate": (
        lambda m: m.generate(tokens(1, 1, 40), past_key_values=opened(m), max_new_tokens=2),
        "let kvtrie.selective.generate or SelectiveCache.read cut it",
    ),
    "lengths of fewer layers": (
        lambda m: opened(m, cache_length=(8, 8)),
        "2 cache lengths for a model of 3 layers",
    ),
    "a batch of others": (
        lambda m: SelectiveCache(m, CacheSettings("h2o-default", cache_length=8), 2).read(
            tokens(1, 3, 4)
        ),
        "a batch of 3 for a SelectiveCache of 2 rows: open one with batch=3",
    ),
    "a mask with holes": (
        lambda m: opened(m).read(tokens(1, 1, 4), torch.tensor([[1, 0, 1, 1]])),
        "pad on the left",
    ),
    "heads too small for codes": (
        lambda _: opened(make(num_attention_heads=8), "h2o-torch-quantized8"),
        "heads of 8 numbers are too small",
    ),
    "a sequence beyond dense": (
        lambda m: opened(m, "dense-default").steps(17),
        "a sequence of 17 tokens is longer than the 16 rows",
    ),
    "steps of no number": (lambda m: opened(m).steps("x"), "total is 'x', a whole number"),
    "rows of no number": (lambda m: opened(m).shrink([8, 8, "x"]), "cache_length is 'x'"),
    "rows of fewer layers": (lambda m: opened(m).shrink([8, 8]), "2 cache lengths for 3 layers"),
    "a crop ahead": (lambda m: opened(m).crop(2), "cannot crop by 2: a number below 0"),
    "settings of no class": (lambda m: SelectiveCache(m, "h2o"), "settings is 'h2o'"),
    "an executor that is none": (lambda m: opened(m).park(None), "executor is None"),
    "tokens in a list": (lambda m: opened(m).read([1, 2]), r"input_ids is \[1, 2\]"),
    "a sequence in a list": (
        lambda m: generate(m, [1, 2], CacheSettings(cache_length=8)),
        r"input_ids is \[1, 2\]",
    ),
    "no tokens": (lambda m: opened(m).read(tokens(1, 1, 0)), r"input_ids are \(1, 0\)"),
    "a mask of fewer columns": (
        lambda m: opened(m).read(tokens(1, 1, 9), torch.ones(1, 4)),
        r"attention_mask is \(1, 4\), \(1, 9\) wanted",
    ),
    "an argument of no policy": (
        lambda m: opened(m, cache_kwargs={"working": 1}),
        "no policy takes working",
    ),
    "generate without a cache": (
        lambda m: generate(m, tokens(1, 1, 4), CacheSettings(cache_length=8), use_cache=False),
        "leave use_cache out",
    ),
    "an answer beyond dense": (
        lambda m: generate(
            m, tokens(1, 1, 30), CacheSettings("dense-default", 32), max_new_tokens=9
        ),
        "a sequence of 39 tokens is longer than the 32 rows",
    ),
    "a pass from the start": (
        lambda m: again(m, tokens(1, 1, 4), position_ids=torch.arange(4)[None]),
        "position_ids say 0 at token 5",
    ),
    "a prompt that repeats what was read": (
        lambda m: again(m, tokens(1, 1, 9), position_ids=torch.arange(9)[None]),
        "a pass of 9 tokens from position 0 on, and this cache has read 5",
    ),
    "gradients": (
        lambda m: m(tokens(1, 1, 4), past_key_values=opened(m)),
        "carry no gradient.*torch.no_grad",
    ),
    "gradients of embeddings": (
        lambda _: embedded(make().requires_grad_(requires_grad=False)),
        "carry no gradient",
    ),
    "training mode": (lambda _: again(make().train()), "model is in training mode"),
    "a dense cache that is full": (
        lambda m: again(m, tokens(1, 1, 1), name="dense-default", cache_length=5),
        "a sequence of 6 tokens is longer than the 5 rows of a dense cache",
    ),
    "prompt lookup": (
        lambda m: generate(
            m, tokens(1, 1, 9), CacheSettings(cache_length=64), prompt_lookup_num_tokens=3
        ),
        "leave prompt_lookup_num_tokens out",
    ),
    "an assistant": (
        lambda m: generate(m, tokens(1, 1, 9), CacheSettings(cache_length=64), assistant_model=m),
        "leave assistant_model out",
    ),
    "prompt lookup over an open cache": (
        lambda m: lookup(m, prompt_lookup_num_tokens=3),
        "a pass of 10 tokens from position 0 on, and this cache has read 9",
    ),
    "an uncached generate over an open cache": (
        lambda m: lookup(m, use_cache=False),
        "a pass of 11 tokens from position 0 on, and this cache has read 10",
    ),
    "a mask of another prompt": (
        lambda m: generate(
            m, tokens(1, 1, 9), CacheSettings(cache_length=64), attention_mask=torch.ones(1, 12)
        ),
        r"attention_mask is \(1, 12\), input_ids \(1, 9\)",
    ),
    "a cache for generate": (
        lambda m: generate(
            m, tokens(1, 1, 4), CacheSettings(cache_length=8), past_key_values=object()
        ),
        "leave past_key_values out",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(llama, what):
    call, message = REFUSED[what]
    with pytest.raises(ConfigError, match=message):
        call(llama)
    assert llama.config._attn_implementation == "sdpa"
