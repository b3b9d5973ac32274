"""Selective caches of models with windows: a policy chooses where attention is full, alone."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from decoders import WINDOW, WINDOWED, answer, make, tokens
from sight import equal_under_masks, passes

from kvtrie import BlockManager, ModelShape, Tier
from kvtrie.errors import ConfigError
from kvtrie.selective import CacheSettings, SelectiveCache, generate
from kvtrie.selective.names import make_cache
from kvtrie.tiers import open_pools
from kvtrie.transfer import Executor

LONG = 4 * WINDOW + 5


@pytest.fixture(scope="module", params=WINDOWED)
def model(request):
    return make(request.param)


def padding(ids):
    mask = torch.ones_like(ids)
    mask[1, : WINDOW + 3] = 0  # more than a window, so that some queries see padding's rows gone
    return mask


@pytest.mark.parametrize("padded", [False, True])
def test_with_every_row_kept_logits_are_the_models_own(model, padded):
    ids = tokens(1, 2, LONG)
    mask = padding(ids) if padded else torch.ones_like(ids)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        truth = model(ids, attention_mask=mask, position_ids=positions).logits
    for seed in range(2):  # in passes of drawn lengths, the first of them longer than the window
        with SelectiveCache(model, CacheSettings("h2o-default", cache_length=LONG), 2) as cache:
            mine = passes(model, cache, ids, random.Random(seed), mask if padded else None)
        assert (mine - truth)[mask.bool()].abs().max() < 1e-4


@pytest.mark.grid
@pytest.mark.parametrize("prompt", [WINDOW - 2, WINDOW, LONG])
@pytest.mark.parametrize("more", [{}, {"num_beams": 2}])
def test_with_every_row_kept_answers_are_the_models_own(model, prompt, more):
    ids = tokens(2, 2, prompt)
    settings = CacheSettings("h2o-default", cache_length=LONG + 30, chunk_size=7)
    given = {"max_new_tokens": WINDOW + 3, "do_sample": False, **more}
    assert torch.equal(generate(model, ids, settings, **given), answer(model, ids, **given))
    mask = padding(ids) if prompt == LONG else None
    if mask is not None:
        padded = generate(model, ids, settings, attention_mask=mask, **given)
        assert torch.equal(padded, answer(model, ids, attention_mask=mask, **given))


@pytest.mark.parametrize(
    "policy",
    [
        "h2o",
        "expected",
        *(pytest.param(each, marks=pytest.mark.deep) for each in ("lastrec", "h2o-vlen", "snapkv")),
    ],
)
def test_a_policy_is_a_mask_of_the_layers_with_full_attention(policy):
    for kind in ("gemma2", "gemma3", "gpt_oss"):
        arguments = {} if policy == "lastrec" else {"grace_period": 3}
        equal_under_masks(make(kind), policy, 4, layer=1, **arguments)
        equal_under_masks(make(kind), policy, 5, layer=1, padded=True, **arguments)


def test_windows_bound_memory_and_no_step(model):
    settings = CacheSettings("h2o-default", cache_length=30, chunk_size=10)
    with SelectiveCache(model, settings) as cache:
        spans = [layer.span for layer in cache.caches]
        assert WINDOW in spans
        first = 10 if None not in spans else 30
        assert cache.steps(65)[:2] == [first, 10]
        sizes = []
        for _ in range(2):
            cache.read(tokens(3, 1, 65))
            sizes.append([layer.buffers.nbytes for layer in cache.caches])
        assert sizes[0] == sizes[1]
        for layer in cache.caches:
            assert layer.token_pos.shape[2] == (30 if layer.span is None else WINDOW)
        assert not cache.is_croppable


def test_a_cache_with_windows_is_copied_shrunk_cropped_and_reordered(model):
    ids = tokens(4, 2, LONG)
    settings = CacheSettings("h2o-default", cache_length=LONG)
    with torch.no_grad():
        truth = model(ids).logits[:, -1]
    with SelectiveCache(model, settings, 2) as cache:
        cache.read(ids[:, : WINDOW - 1])
        cache.crop(-3)  # nothing has left a window yet
        cache.read(ids[:, WINDOW - 4 : -4])
        with pytest.raises(ConfigError, match="cannot crop by 2"):
            cache.crop(-2)
        other = copy.deepcopy(cache)
        cache.reorder_cache(torch.tensor([1, 0]))
        assert (cache.read(ids[:, -4:].flip(0)) - truth.flip(0)).abs().max() < 1e-4
        assert (other.read(ids[:, -4:]) - truth).abs().max() < 1e-4
        other.close()
        cache.shrink(LONG - 5)
        assert {layer.cache_length for layer in cache.caches} <= {LONG - 5, WINDOW}


def test_a_cache_with_windows_waits_and_comes_back():
    model, ids = make("gemma3"), tokens(5, 1, LONG)
    shape = ModelShape(2, 2, 16)
    tiers = [Tier("gpu", blocks=64), Tier("host", blocks=64)]
    manager = BlockManager(shape, tiers, block_tokens=8)
    settings = CacheSettings("h2o-int8", cache_length=20, chunk_size=6)
    with Executor(manager, open_pools(shape, tiers, 8)) as executor:
        with SelectiveCache(model, settings) as whole:
            whole.read(ids[:, :-6])
            truth = whole.read(ids[:, -6:])
        cache = SelectiveCache(model, settings)
        cache.read(ids[:, :-6])
        parked = cache.park(executor)
        executor.drain()
        with parked.resume(model) as again:
            assert torch.equal(again.read(ids[:, -6:]), truth)


def test_yarn_scales_what_has_full_attention_alone():
    """Positions within a window are never farther apart than in training."""
    gemma = make("gemma3", max_position_embeddings=LONG - 9)
    with SelectiveCache(gemma, CacheSettings("dense-default", cache_length=LONG)) as cache:
        cache.steps(LONG)
        assert cache.rope_factor == LONG / (LONG - 9)
        x, columns = torch.zeros(1), torch.arange(LONG)[None]
        for kind, scaled in (("full_attention", True), ("sliding_attention", False)):
            own = gemma.model.rotary_emb(x, columns, kind)
            found = cache._layers.rope.fixed.rotation(x, columns, kind)
            assert (found is not None) is scaled
            assert not scaled or not torch.equal(found[0], own[0])
    ids = tokens(6, 1, LONG)
    mistral = make("mistral with windows", max_position_embeddings=LONG - 9)
    with SelectiveCache(mistral, CacheSettings("h2o-default", cache_length=LONG)) as cache:
        mine = cache.read(ids)
        assert cache.rope_factor == 1
    with torch.no_grad():
        assert (mine - mistral(ids).logits[:, -1]).abs().max() < 1e-4


def test_a_window_that_layers_and_configuration_do_not_agree_on_is_refused():
    model = make("gemma3")
    model.model.layers[0].self_attn.sliding_window = WINDOW + 1
    with pytest.raises(ConfigError, match=r"layer 0 has a window of 10, its configuration says 9"):
        SelectiveCache(model, CacheSettings("h2o-default", cache_length=20))


def test_a_windows_rows_are_refused_when_they_cannot_be():
    given = {"batch": 1, "kv_heads": 1, "query_heads": 1, "cache_length": 9, "head_dim": 4}
    made = make_cache("h2o-default", dtype=torch.float32, span=5, **given)
    with pytest.raises(ConfigError, match="not finite"):
        made.forward(*(torch.full((1, 1, 3, 4), torch.nan) for _ in range(3)))
    assert made.input_pos == 0
    with pytest.raises(ConfigError, match="chooses no rows"):
        made.next_positions(2)
