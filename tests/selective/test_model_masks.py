"""Policies are masks: a read in drawn passes and one dense pass under what each query saw agree."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from decoders import CODED, KINDS, POLICIES, make, tokens
from sight import equal_under_masks, passes

from kvtrie.selective import CacheSettings, SelectiveCache
from kvtrie.selective.buffers import CodedBuffers
from kvtrie.selective.names import BUFFERS


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_is_a_mask(llama, policy):
    equal_under_masks(llama, policy, 1)


@pytest.mark.parametrize(
    ("policy", "buffers", "arguments"),
    [
        ("qh2o", "torch-quantized8", {"grace_period": 3}),
        ("qh2o-vlen", "torch-quantized4", {"sinks": 2}),
        ("qh2o", "int8", {}),
        ("qh2o-vlen", "fp8", {"grace_period": 2, "normalize_scores": True}),
        ("mix-snapkv+keydiff", "torch-quantized8", {"grace_period": 3}),
    ],
)
def test_a_policy_over_codes_is_a_mask_over_what_codes_say(llama, policy, buffers, arguments):
    """New rows are exact within their step, and what their codes say from then on."""
    equal_under_masks(llama, policy, 1, buffers=buffers, **arguments)
    equal_under_masks(llama, policy, 2, buffers=buffers, padded=True, **arguments)


@pytest.mark.parametrize("defect", ["always coded", "always exact"])
def test_when_rows_become_what_codes_say_is_seen(llama, monkeypatch, defect):
    """A cache that lets a step see its own codes, or a later one what was exact."""
    write = CodedBuffers.write

    def coded(self, rows, keys, values):
        write(self, rows, self.rounded(keys), self.rounded(values))

    if defect == "always coded":
        monkeypatch.setattr(CodedBuffers, "write", coded)
    else:
        monkeypatch.setattr(CodedBuffers, "end_step", lambda _: None)
    with pytest.raises(AssertionError):
        equal_under_masks(llama, "qh2o", 1, buffers="torch-quantized4")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kv_heads", [4, 1])
def test_a_policy_is_a_mask_under_other_models(kind, kv_heads):
    equal_under_masks(make(kind, kv_heads), "h2o", 2, grace_period=3)


def test_three_query_heads_of_a_group():
    model = make(num_attention_heads=6, hidden_size=96)
    equal_under_masks(model, "snapkv", 5, grace_period=3)


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "h2o-orig"])
def test_padding_is_never_seen(llama, policy):
    arguments = {"sinks": 2} if policy == "lastrec" else {"grace_period": 3, "sinks": 2}
    equal_under_masks(llama, policy, 3, padded=True, **arguments)


@pytest.mark.deep
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_every_policy_is_a_mask(kind, kv_heads):
    models = [make(kind, kv_heads)]
    if kv_heads == 2:  # groups of three query heads
        models.append(make(kind, kv_heads, num_attention_heads=6, hidden_size=96))
    names = [(policy, "default") for policy in POLICIES]
    names += [(policy, buffers) for policy in (*CODED, "h2o", "keydiff") for buffers in BUFFERS[1:]]
    for model, (policy, buffers), seed in itertools.product(models, names, range(3)):
        padded = policy != "h2o-orig" and seed == 2
        equal_under_masks(model, policy, seed, buffers=buffers, padded=padded)


@pytest.mark.parametrize("policy", ["dense", *POLICIES])
def test_as_many_rows_as_tokens_are_exact(llama, policy):
    ids = tokens(4, 2, 40)
    with torch.no_grad():
        truth = llama(ids).logits
    settings = CacheSettings(f"{policy}-default", cache_length=40)
    with SelectiveCache(llama, settings, 2) as cache:
        mine = passes(llama, cache, ids, random.Random(policy))
    assert (mine - truth).abs().max() < 1e-4
