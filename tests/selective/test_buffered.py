"""Rows of a selective cache when it is shrunk or cropped."""

from __future__ import annotations

import pytest
import torch
from playing import SIZES, step

from kvtrie.errors import ConfigError
from kvtrie.selective import make_cache


@pytest.mark.parametrize("policy", ["lastrec", "h2o", "keydiff", "mix-h2o+keydiff", "snapkv"])
@pytest.mark.parametrize("sinks", [0, 2])
def test_a_shrunk_cache_goes_on(policy, sinks):
    cache = make_cache(
        f"{policy}-torch-quantized8", cache_length=14, dtype=torch.float32, sinks=sinks, **SIZES
    )
    generator = torch.Generator().manual_seed(15)
    for new in (14, 5, 3):
        cache(*step(generator, new))
    before = [set(row) for row in cache.token_pos.flatten(0, 1).tolist()]
    cache.shrink(8)
    assert cache.token_pos.shape == (2, 2, 8)
    for row, held in zip(cache.token_pos.flatten(0, 1).tolist(), before, strict=True):
        assert set(row) <= held
        assert set(range(sinks)) <= set(row)
    for new in (8 - sinks, 1, 3, 2):
        out = cache(*step(generator, new))
        assert out.isfinite().all()
        held = cache.token_pos.sort(dim=-1).values
        assert (held.diff() > 0).all()
        if policy == "lastrec":
            assert held[0, 0, sinks:].tolist() == list(
                range(cache.input_pos - 8 + sinks, cache.input_pos)
            )
    with pytest.raises(ConfigError, match="cannot shrink 8 rows to 9"):
        cache.shrink(9)


def test_a_crop_is_exact_until_something_was_evicted():
    cache = make_cache("h2o-default", cache_length=8, dtype=torch.float32, **SIZES)
    dense = make_cache("dense-default", cache_length=8, dtype=torch.float32, **SIZES)
    generator = torch.Generator().manual_seed(16)
    first, second, third = (step(generator, new) for new in (4, 3, 4))
    cache(*first)
    cache(*second)
    cache.crop(3)
    dense(*first)
    assert torch.allclose(cache(*third), dense(*third), atol=1e-5)
    cache(*second)
    with pytest.raises(ConfigError, match="cannot crop by 1 of 11 tokens"):
        cache.crop(1)
