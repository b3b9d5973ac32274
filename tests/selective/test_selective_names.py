"""Names of caches: policies and buffers that exist, and the arguments that each takes."""

from __future__ import annotations

import sys

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


OWN = """
from kvtrie.selective import AttnWeightsKVCache
from kvtrie.selective.policies import H2OKVCache

class Mine(H2OKVCache):
    pass

class Half(AttnWeightsKVCache):
    pass

number = 5
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A package of a user with a policy."""
    (tmp_path / "own_package").mkdir()
    (tmp_path / "own_package" / "rules.py").write_text(OWN)
    (tmp_path / "own_package" / "broken.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    yield "own_package.rules:Mine"
    for name in [name for name in sys.modules if name.startswith("own_package")]:
        del sys.modules[name]


@pytest.mark.parametrize("buffers", ["default", "int8"])
def test_a_policy_of_ones_own_is_named_by_its_import_path(own, buffers):
    made = make_cache(f"{own}-{buffers}", cache_length=16, dtype=torch.float32, **SIZES)
    assert type(made).__name__ == "Mine"
    assert isinstance(made, AttnWeightsKVCache)
    make_cache(f"mix-h2o+{own}-{buffers}", cache_length=16, dtype=torch.float32, **SIZES)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_package.rules:Other", "cannot be imported: AttributeError"),
        ("own_package.none:Mine", "cannot be imported: ModuleNotFoundError"),
        ("own_package.broken:Mine", "cannot be imported: ZeroDivisionError"),
        (":Mine", "cannot be imported: ValueError"),
        ("own_package.rules:", "cannot be imported: AttributeError"),
        ("own_package.rules:number", "is 5, a subclass of KVCacheWithBuffers wanted"),
        ("own_package.rules:Half", "with all abstract methods"),
        ("builtins:int", "a subclass of KVCacheWithBuffers wanted"),
    ],
)
@pytest.mark.usefixtures("own")
def test_an_import_path_without_a_policy_is_refused(name, message):
    with pytest.raises(ConfigError, match=message):
        make(name)


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
