"""Every policy, token by token, against loops that know no tensors of rows."""

from __future__ import annotations

import random

import pytest
import torch
from playing import BUFFERS, MIXES, SEVEN, SIZES, SMALL, play, step

from kvtrie.selective import (
    AttnWeightsKVCache,
    make_cache,
)
from kvtrie.selective.policies import VLengthH2OKVCache

ARGUMENTS = (
    {},
    {"grace_period": 4},
    {"grace_period": 3, "sinks": 2, "normalize_scores": True},
    {"sinks": 3, "max_chunk_size": 4},
    {"prefill_scores": 4},
    {"prefill_scores": 0, "keep_initial_fraction": 0.3},
    {"prefill_scores": 0, "grace_period": 5, "normalize_scores": True},
    {"grace_period": 2, "first": [0, 5]},
    {"sinks": 2, "first": [3, 0]},
    {"sinks": 3, "keep_initial_fraction": 0.0},
    {"init_grace_tokens": 3},
)


def allowed(policy):
    """The arguments of a policy that some case gives, as the documentation names them."""
    if policy == "dense":
        return set()
    if policy == "lastrec":
        return {"sinks", "init_grace_tokens"}
    scored = {"prefill_scores", "keep_initial_fraction", "sinks"}
    more = {"grace_period", "normalize_scores", "max_chunk_size"}
    return scored if policy == "h2o-orig" else scored | more


def cases():
    for policy in (*SEVEN, *SMALL, *MIXES):
        for buffers in BUFFERS:
            if buffers == "default" and policy.startswith("q"):
                continue
            for arguments in ARGUMENTS:
                names = set(arguments)
                padded = policy == "h2o-orig" and "first" in names
                if not padded and names - {"first"} <= allowed(policy):
                    yield policy, buffers, arguments


@pytest.mark.parametrize("policy", [*SEVEN, *SMALL, *MIXES])
def test_a_policy_does_what_loops_do(policy):
    mine = [case for case in cases() if case[0] == policy]
    draw = random.Random(policy)
    for at, (_, buffers, arguments) in enumerate(draw.sample(mine, min(4, len(mine)))):
        _, oracle, steps, _ = play(policy, buffers, at, total=45, **arguments)
        assert oracle.ties < steps


@pytest.mark.parametrize("policy", [*SEVEN[1:], *SMALL, *MIXES])
def test_a_first_step_may_fill_the_cache(policy):
    """So the first eviction comes right after it, scored by its last queries or not."""
    buffers = "torch-quantized8" if policy.startswith("q") else "default"
    scored = "prefill_scores" in allowed(policy)
    for arguments in ({}, {"prefill_scores": 5}, {"prefill_scores": 0}) if scored else ({},):
        play(policy, buffers, 1, total=30, length=9, steps=[9, 4, 1], **arguments)


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(6))
def test_every_policy_and_buffer_does_what_loops_do(seed, capsys):
    count, steps, ties, worst = 0, 0, 0, 0.0
    for policy, buffers, arguments in cases():
        _, oracle, ran, error = play(policy, buffers, seed, **arguments)
        count, steps, ties = count + 1, steps + ran, ties + oracle.ties
        worst = max(worst, error)
    said = f"seed {seed}: {count} caches, {steps} steps, {ties} ties, worst {worst:.2g}"
    with capsys.disabled():
        print(said)  # noqa: T201


def test_lengths_of_values_decide():
    """The same errors and weights, other norms of values: `qh2o-vlen` is not `qh2o`."""
    caches = {
        name: make_cache(f"{name}-torch-quantized8", cache_length=12, dtype=torch.float32, **SIZES)
        for name in ("qh2o", "qh2o-vlen")
    }
    generator = torch.Generator().manual_seed(9)
    for new in (6, 6, 4):
        query, key, value = step(generator, new)
        value *= torch.rand(2, 2, new, 1, generator=generator) * 9
        for cache in caches.values():
            cache(query, key, value)
    assert not torch.equal(*(cache.token_pos.sort().values for cache in caches.values()))


def test_the_oracle_sees_a_wrong_score(monkeypatch):
    from kvtrie.selective.policies import H2OKVCache

    monkeypatch.setattr(H2OKVCache, "_compute_scores", lambda _, rows: rows.token_pos.float())
    with pytest.raises(AssertionError):
        play("h2o", "default", 0)


def forget_lengths(monkeypatch):
    """`qh2o-vlen` cumulates as `qh2o` does."""
    monkeypatch.setattr(VLengthH2OKVCache, "_cumulate", AttnWeightsKVCache._cumulate)


def test_forgotten_lengths_of_values_are_seen(monkeypatch):
    forget_lengths(monkeypatch)
    with pytest.raises(AssertionError):
        test_lengths_of_values_decide()
