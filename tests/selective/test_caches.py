"""A step of a selective cache: the first one, those without weights, and rows of lastrec."""

from __future__ import annotations

import pytest
import torch
from playing import SIZES, step

from kvtrie.selective import make_cache


def test_a_first_step_is_torchs_fast_kernel(monkeypatch):
    """No weights are computed then, even by a policy that wants them in every other step."""
    from kvtrie.selective import cache as module

    def slow(*_, **__):
        raise AssertionError

    cache = make_cache("h2o-default", cache_length=12, dtype=torch.float32, **SIZES)
    monkeypatch.setattr(module, "attend", slow)
    cache(*step(torch.Generator(), 9))
    assert not cache.scores.any()
    with pytest.raises(AssertionError):
        cache(*step(torch.Generator(), 1))


@pytest.mark.parametrize("policy", ["keydiff", "knorm", "random", "lastrec"])
def test_a_policy_that_needs_no_weights_gets_none(policy, monkeypatch):
    from kvtrie.selective import attn_weights
    from kvtrie.selective import cache as module

    for each in (module, attn_weights):
        monkeypatch.setattr(each, "attend", None)
    cache = make_cache(f"{policy}-default", cache_length=8, dtype=torch.float32, **SIZES)
    for new in (8, 3, 1):
        assert cache(*step(torch.Generator(), new)).isfinite().all()


def test_tokens_lie_as_lastrec_says():
    """Token t in row t until full; the first rows stay, the others are a ring."""
    cache = make_cache(
        "lastrec-default", cache_length=8, dtype=torch.float32, init_grace_tokens=3, **SIZES
    )
    generator = torch.Generator().manual_seed(18)
    cache(*step(generator, 5))
    cache(*step(generator, 3))
    assert (cache.token_pos == torch.arange(8)).all()
    assert cache.largest_step == 5
    cache(*step(generator, 2))
    assert (cache.token_pos == torch.tensor([0, 1, 2, 8, 9, 5, 6, 7])).all()
    cache(*step(generator, 5))
    assert (cache.token_pos == torch.tensor([0, 1, 2, 13, 14, 10, 11, 12])).all()
