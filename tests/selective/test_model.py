"""A selective cache under transformers' own models: steps, memory, batch rows, copies."""

from __future__ import annotations

import copy

import pytest
import torch
from decoders import make, tokens

from kvtrie.errors import ConfigError
from kvtrie.selective import CacheSettings, SelectiveCache


def test_steps_end_where_each_layer_is_full(llama):
    settings = CacheSettings("h2o-default", cache_length=(24, 16, 40), chunk_size=10)
    with SelectiveCache(llama, settings) as cache:
        steps = cache.steps(75)
        assert steps == [16, 8, 10, 6, 10, 10, 10, 5]
        assert cache.read(tokens(11, 1, 75)).isfinite().all()
        assert [layer.filled for layer in cache.caches] == [24, 16, 40]


def test_drawn_steps_have_five_sizes_around_the_one_given(llama):
    settings = CacheSettings(
        "h2o-default", cache_length=100, chunk_size=20, randomize_chunk_sizes=True, seed=3
    )
    with SelectiveCache(llama, settings) as cache:
        steps = cache.steps(6000)
        assert steps == cache.steps(6000)
    sizes = set(steps[1:-1])
    assert len(sizes) == 5
    assert min(sizes) >= 10
    assert max(sizes) <= 30
    other = CacheSettings(
        "h2o-default", cache_length=100, chunk_size=20, randomize_chunk_sizes=True, seed=4
    )
    with SelectiveCache(llama, other) as cache:
        assert cache.steps(6000) != steps


@pytest.mark.parametrize("buffers", ["default", "torch-quantized8", "int8"])
def test_memory_does_not_grow(llama, buffers):
    settings = CacheSettings(f"h2o-{buffers}", cache_length=32, chunk_size=16)
    sizes = []
    with SelectiveCache(llama, settings) as cache:
        for _ in range(2):
            cache.read(tokens(12, 1, 200))
            sizes.append(sum(layer.buffers.nbytes for layer in cache.caches))
            assert all(layer.token_pos.shape[2] == 32 for layer in cache.caches)
    assert sizes[0] == sizes[1]


def test_buffers_have_the_models_precision():
    model = make().to(torch.bfloat16)
    for name in ("h2o-default", "h2o-torch-quantized8"):
        with SelectiveCache(model, CacheSettings(name, cache_length=16)) as cache:
            assert cache.read(tokens(13, 1, 40)).dtype == torch.bfloat16
            assert cache.caches[0].keys_values()[0].dtype == torch.bfloat16
            assert cache.caches[0].scores.dtype == torch.float32


def test_a_shrunk_model_cache_goes_on(llama):
    with SelectiveCache(llama, CacheSettings("h2o-default", cache_length=32)) as cache:
        cache.read(tokens(14, 1, 50))
        cache.shrink(20)
        cache.read(tokens(15, 1, 30))
        assert {layer.filled for layer in cache.caches} == {20}
        with pytest.raises(ConfigError, match="cannot shrink 20 rows to 21"):
            cache.shrink(21)
        assert cache.get_seq_length() == 80


def test_crops_are_exact_or_refused(llama):
    ids = tokens(16, 1, 30)
    with SelectiveCache(llama, CacheSettings("h2o-default", cache_length=32)) as cache:
        cache.read(ids[:, :20])
        assert cache.is_croppable
        cache.crop(-5)
        with torch.no_grad():
            truth = llama(ids).logits[:, -1]
        assert (cache.read(ids[:, 15:]) - truth).abs().max() < 1e-4
        cache.read(tokens(17, 1, 8))
        assert not cache.is_croppable
        with pytest.raises(ConfigError, match="cannot crop by 2 of 38 tokens"):
            cache.crop(-2)


def test_rows_of_a_batch_are_selected(llama):
    ids = tokens(18, 3, 40)
    settings = CacheSettings("h2o-torch-quantized8", cache_length=16)
    with SelectiveCache(llama, settings, 3) as cache, SelectiveCache(llama, settings) as alone:
        cache.read(ids)
        alone.read(ids[2:])
        cache.batch_select_indices(torch.tensor([2, 0]))
        cache.reorder_cache(torch.tensor([0, 0]))
        more = tokens(19, 1, 5)
        both, one = cache.read(more.expand(2, 5)), alone.read(more)
    assert (both - one).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["h2o-torch-quantized8", "snapkv-default", "mix-h2o+keydiff-int8"])
def test_a_copy_goes_on_by_itself(llama, name):
    ids, more = tokens(20, 2, 50), tokens(21, 2, 9)
    mask = (torch.arange(50) >= torch.tensor([[0], [7]])).long()
    settings = CacheSettings(name, cache_length=20, cache_kwargs={"grace_period": 3})
    with SelectiveCache(llama, settings, 2) as cache:
        cache.read(ids, mask)
        with copy.deepcopy(cache) as other, copy.copy(cache) as third:
            assert other.get_seq_length() == 50
            expected = other.read(more)
            other.read(tokens(22, 2, 9))
            assert torch.equal(cache.read(more), expected)
            assert torch.equal(third.read(more), expected)
        assert cache.read(more).isfinite().all()
        cache.shrink(12)
        with copy.deepcopy(cache) as shrunk:
            assert torch.equal(cache.read(more), shrunk.read(more))


def test_a_reset_brings_the_batch_back_that_was_opened(llama):
    with SelectiveCache(llama, CacheSettings("h2o-default", cache_length=20)) as cache:
        truth = cache.read(tokens(1, 1, 9))
        for rows in ([0, 0, 0], [0, 0]):
            cache.reorder_cache(torch.tensor(rows))
            cache.reset()
            assert torch.equal(cache.read(tokens(1, 1, 9)), truth)
    with SelectiveCache(llama, CacheSettings("h2o-default", cache_length=20), 2) as cache:
        cache.read(tokens(1, 2, 9))
        cache.batch_select_indices(torch.tensor([1]))
        cache.reset()
        with pytest.raises(ConfigError, match="a batch of 1 for a SelectiveCache of 2 rows"):
            cache.read(tokens(1, 1, 9))
        assert cache.read(tokens(1, 2, 9)).shape == (2, 211)


@pytest.mark.parametrize("policy", ["dense", "lastrec", "keydiff", "knorm", "random"])
def test_policies_without_weights_keep_temporary_arrays_small(llama, policy):
    settings = CacheSettings(f"{policy}-default", cache_length=64, chunk_size=16)
    ids = tokens(30, 1, 60)
    with SelectiveCache(llama, settings) as cache:
        cache.read(ids[:, :20])
        truth = cache.read(ids[:, 20:])
    small = 8 * 4 * 64 * 3 / 1e9  # the masks of three queries
    with SelectiveCache(llama, settings, attention_forward_temp_size_gb=small) as cache:
        cache.read(ids[:, :20])
        assert (cache.read(ids[:, 20:]) - truth).abs().max() < 1e-4
    with SelectiveCache(llama, settings, attention_forward_temp_size_gb=1e-8) as cache:
        cache.read(ids[:, :20])
        with pytest.raises(ConfigError, match="the limit is 1e-08 GB"):
            cache.read(ids[:, 20:])
        assert cache.get_seq_length() == 20
