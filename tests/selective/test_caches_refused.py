"""Refusals of a selective cache, by one error with the numbers in it, and nothing changed."""

from __future__ import annotations

import logging

import pytest
import torch
from playing import SIZES, step

from kvtrie.errors import ConfigError
from kvtrie.selective import make_cache

REFUSED = {
    "a step beyond the filling": (
        lambda: full("h2o", 12, ran=9)(*step(torch.Generator(), 4)),
        "a step of 4 tokens after 9 in a cache of 12 rows",
    ),
    "a step too long": (
        lambda: full("h2o", 12, grace_period=4)(*step(torch.Generator(), 9)),
        "a step of 9 tokens, at most 8 wanted: the cache has 12 rows, a grace period of 4",
    ),
    "a step beyond the limit": (
        lambda: full("h2o", 12, max_chunk_size=3)(*step(torch.Generator(), 4)),
        "a step of 4 tokens, at most 3 wanted",
    ),
    "a sequence beyond dense": (
        lambda: full("dense", 12)(*step(torch.Generator(), 1)),
        "a sequence of 13 tokens is longer than the 12 rows",
    ),
    "numbers that are none": (
        lambda: full("h2o", 12)(*(each * torch.nan for each in step(torch.Generator(), 1))),
        "128 of 128 numbers in queries are not finite",
    ),
    "other shapes": (
        lambda: full("h2o", 12)(*step(torch.Generator(), 1, dim=8)),
        r"keys \(2, 2, 1, 8\)",
    ),
    "a bound below one query": (
        lambda: make_cache(
            "h2o-default", cache_length=4, dtype=torch.float32, tmp_array_limit_gb=1e-9, **SIZES
        )(*step(torch.Generator(), 1)),
        "the weights of one query take 6.4e-08 GB of temporary arrays, the limit is 1e-09 GB",
    ),
    "padding of h2o-orig": (
        lambda: make_cache("h2o-orig-default", cache_length=4, dtype=torch.float32, **SIZES).pad(
            torch.tensor([0, 2])
        ),
        "takes no padding",
    ),
}


def full(policy, length, *, ran=None, **arguments):
    cache = make_cache(
        f"{policy}-default", cache_length=length, dtype=torch.float32, **SIZES, **arguments
    )
    cache(*step(torch.Generator().manual_seed(0), length if ran is None else ran))
    return cache


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_cache_refuses(what):
    call, message = REFUSED[what]
    with pytest.raises(ConfigError, match=message):
        call()


def test_a_limit_that_brings_no_gain_is_noted(caplog):
    for most, said in ((6, 0), (7, 1)):
        with caplog.at_level(logging.INFO, logger="kvtrie.selective.arguments"):
            full("h2o", 12, max_chunk_size=most)
        assert sum("brings no gain with 12 rows" in line for line in caplog.messages) == said


@pytest.mark.parametrize("what", ["long", "nan", "memory", "shape"])
def test_a_refused_step_has_changed_nothing(what):
    cache = make_cache(
        "h2o-torch-quantized8", cache_length=9, dtype=torch.float32, grace_period=2, **SIZES
    )
    generator = torch.Generator().manual_seed(17)
    cache(*step(generator, 9))
    cache(*step(generator, 3))
    held = [each.clone() for each in (*cache.buffers.planes, cache.token_pos, cache.scores)]
    query, key, value = step(generator, 8 if what == "long" else 2)
    if what == "nan":
        value[0, 0, 1, 3] = torch.nan
    if what == "memory":
        cache.tmp_array_limit_gb = 1e-9
    if what == "shape":
        query = query[:, :3]
    with pytest.raises(ConfigError):
        cache(query, key, value)
    now = (*cache.buffers.planes, cache.token_pos, cache.scores)
    assert all(torch.equal(old, new) for old, new in zip(held, now, strict=True))
    assert cache.input_pos == 12
