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
    "a policy of no name": (lambda: full("h3o", 12), "no policy 'h3o'"),
    "buffers of no name": (
        lambda: make_cache("h2o-int7", cache_length=4, dtype=torch.float32, **SIZES),
        "is no {policy}-{buffers}",
    ),
    "errors of exact buffers": (lambda: full("qh2o", 12), "qh2o weighs the errors of codes"),
    "an argument that lastrec lacks": (
        lambda: full("lastrec", 12, grace_period=1),
        "lastrec has no argument grace_period: it takes init_grace_tokens, sinks",
    ),
    "an argument that h2o-orig lacks": (
        lambda: full("h2o-orig", 12, max_chunk_size=1),
        "h2o-orig has no argument max_chunk_size",
    ),
    "an argument of no policy": (lambda: full("h2o", 12, grace=1), "no policy takes grace"),
    "a grace period of all rows": (
        lambda: full("h2o", 12, grace_period=12),
        "a grace period of 12 and 0 sinks leave no row of 12",
    ),
    "a share that is no number": (
        lambda: full("h2o", 12, keep_initial_fraction=float("nan")),
        "keep_initial_fraction is nan",
    ),
    "numbers that are none": (
        lambda: full("h2o", 12)(*(each * torch.nan for each in step(torch.Generator(), 1))),
        "128 of 128 numbers in queries are not finite",
    ),
    "other shapes": (
        lambda: full("h2o", 12)(*step(torch.Generator(), 1, dim=8)),
        r"keys \(2, 2, 1, 8\)",
    ),
    "a card's buffers": (
        lambda: make_cache("h2o-bnb-quantized4", cache_length=4, dtype=torch.float32, **SIZES),
        "need a CUDA device",
    ),
    "a grace period of h2o-orig": (
        lambda: full("h2o-orig", 12, grace_period=2),
        "h2o-orig has no argument grace_period",
    ),
    "normalised scores of h2o-orig": (
        lambda: full("h2o-orig", 12, normalize_scores=True),
        "h2o-orig has no argument normalize_scores",
    ),
    "an argument that dense lacks": (
        lambda: full("dense", 12, sinks=1),
        "dense has no argument sinks: it takes none",
    ),
    "a window": (lambda: full("snapkv", 12, window=3), "no policy takes window"),
    "a mix with itself": (lambda: full("mix-h2o+h2o", 12), "mixes a policy with itself"),
    "a mix with lastrec": (lambda: full("mix-h2o+lastrec", 12), "dense and lastrec do not"),
    "errors of exact buffers in a mix": (
        lambda: full("mix-qh2o+keydiff", 12),
        "weighs the errors of codes",
    ),
    "whole numbers": (
        lambda: make_cache("h2o-default", cache_length=4, dtype=torch.int32, **SIZES),
        "dtype is torch.int32, one of floating point wanted",
    ),
    "a device of no name": (
        lambda: make_cache(
            "h2o-default", cache_length=4, dtype=torch.float32, device="nowhere", **SIZES
        ),
        "device is 'nowhere'",
    ),
    "query heads that do not divide": (
        lambda: make_cache(
            "h2o-default", cache_length=4, dtype=torch.float32, **SIZES | {"query_heads": 5}
        ),
        "5 query heads do not divide over 2 heads",
    ),
    "a bound below one query": (
        lambda: make_cache(
            "h2o-default", cache_length=4, dtype=torch.float32, tmp_array_limit_gb=1e-9, **SIZES
        )(*step(torch.Generator(), 1)),
        "the weights of one query take 6.4e-08 GB of temporary arrays, the limit is 1e-09 GB",
    ),
    "a bound that is no number": (
        lambda: make_cache(
            "h2o-default", cache_length=4, dtype=torch.float32, tmp_array_limit_gb=-1, **SIZES
        ),
        "tmp_array_limit_gb is -1",
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
