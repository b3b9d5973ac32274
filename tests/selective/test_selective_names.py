"""Names of caches: policies and buffers that exist, and the arguments that each takes."""

from __future__ import annotations

import pytest
import torch
from playing import SIZES

from kvtrie.errors import ConfigError
from kvtrie.selective import (
    AttnWeightsKVCache,
    AttnWeightsReplayLog,
    make_cache,
    register,
)


def test_what_is_no_policy_has_no_name():
    for what in (int, AttnWeightsReplayLog, "h2o"):
        with pytest.raises(ConfigError, match="policy is"):
            register("nothing", what)
    with pytest.raises(ConfigError, match="'h2o' cannot be a policy's name"):
        register("h2o", AttnWeightsKVCache)


REFUSED = {
    "a policy of no name": (lambda: make("h3o"), "no policy 'h3o'"),
    "buffers of no name": (
        lambda: make_cache("h2o-int7", cache_length=4, dtype=torch.float32, **SIZES),
        "is no {policy}-{buffers}",
    ),
    "errors of exact buffers": (lambda: make("qh2o"), "qh2o weighs the errors of codes"),
    "an argument that lastrec lacks": (
        lambda: make("lastrec", grace_period=1),
        "lastrec has no argument grace_period: it takes init_grace_tokens, sinks",
    ),
    "an argument that h2o-orig lacks": (
        lambda: make("h2o-orig", max_chunk_size=1),
        "h2o-orig has no argument max_chunk_size",
    ),
    "an argument of no policy": (lambda: make("h2o", grace=1), "no policy takes grace"),
    "a grace period of all rows": (
        lambda: make("h2o", grace_period=12),
        "a grace period of 12 and 0 sinks leave no row of 12",
    ),
    "a share that is no number": (
        lambda: make("h2o", keep_initial_fraction=float("nan")),
        "keep_initial_fraction is nan",
    ),
    "a card's buffers": (
        lambda: make_cache("h2o-bnb-quantized4", cache_length=4, dtype=torch.float32, **SIZES),
        "need a CUDA device",
    ),
    "a grace period of h2o-orig": (
        lambda: make("h2o-orig", grace_period=2),
        "h2o-orig has no argument grace_period",
    ),
    "normalised scores of h2o-orig": (
        lambda: make("h2o-orig", normalize_scores=True),
        "h2o-orig has no argument normalize_scores",
    ),
    "an argument that dense lacks": (
        lambda: make("dense", sinks=1),
        "dense has no argument sinks: it takes none",
    ),
    "a window": (lambda: make("snapkv", window=3), "no policy takes window"),
    "a mix with itself": (lambda: make("mix-h2o+h2o"), "mixes a policy with itself"),
    "a mix with lastrec": (lambda: make("mix-h2o+lastrec"), "dense and lastrec do not"),
    "errors of exact buffers in a mix": (
        lambda: make("mix-qh2o+keydiff"),
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
    "a bound that is no number": (
        lambda: make_cache(
            "h2o-default", cache_length=4, dtype=torch.float32, tmp_array_limit_gb=-1, **SIZES
        ),
        "tmp_array_limit_gb is -1",
    ),
}


def make(policy, **arguments):
    return make_cache(
        f"{policy}-default", cache_length=12, dtype=torch.float32, **SIZES, **arguments
    )


@pytest.mark.parametrize("what", REFUSED)
def test_a_cache_is_refused_by_its_name_or_arguments(what):
    call, message = REFUSED[what]
    with pytest.raises(ConfigError, match=message):
        call()
