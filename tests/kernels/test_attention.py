"""Attention to rows in any order against softmax written out."""

from __future__ import annotations

import math

import pytest
import torch

from kvtrie.errors import ConfigError
from kvtrie.kernels import (
    attend,
    attend_causal,
    attend_masked,
    attend_padded,
    attend_without_weights,
    attention,
)
from kvtrie.kernels.padding import pays, stored


def drawn(new, rows, *, heads=4, groups=2, dim=16, seed=0, input_pos=None):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(2, heads, new, dim, generator=generator)
    keys, values = torch.randn(2, 2, groups, rows, dim, generator=generator)
    input_pos = rows + 5 if input_pos is None else input_pos
    token_pos = torch.stack(
        [
            torch.cat(
                (
                    torch.randperm(input_pos, generator=generator)[: rows - new],
                    torch.arange(input_pos, input_pos + new),
                )
            )[torch.randperm(rows, generator=generator)]
            for _ in range(2 * groups)
        ]
    ).view(2, groups, rows)
    return query, keys, values, token_pos, input_pos


def by_hand(query, keys, values, token_pos, input_pos, first=(0, 0)):
    out, weights = torch.zeros_like(query), torch.zeros(*query.shape[:2], keys.shape[2])
    each = query.shape[1] // keys.shape[1]
    for b in range(query.shape[0]):
        for h in range(query.shape[1]):
            for i in range(query.shape[2]):
                pos = token_pos[b, h // each]
                seen = (pos <= input_pos + i) & (pos >= first[b])
                if not seen.any():
                    continue
                scores = keys[b, h // each] @ query[b, h, i] / math.sqrt(query.shape[3])
                row = torch.softmax(scores.masked_fill(~seen, -torch.inf), dim=0)
                out[b, h, i] = row @ values[b, h // each]
                weights[b, h] += row
    return out, weights


# Square, one query, the case in between, which is many times wider than high, and few hidden rows.
SHAPES = [(8, 8), (1, 30), (6, 60), (40, 64), (16, 600)]


@pytest.mark.parametrize(("new", "rows"), SHAPES)
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("limit", [3.0, 2.6e-5])
def test_attention_is_that_of_a_loop(new, rows, heads, groups, limit):
    query, keys, values, pos, at = drawn(new, rows, heads=heads, groups=groups)
    truth, sums = by_hand(query, keys, values, pos, at)
    place = {"token_pos": pos, "input_pos": at}
    limit = max(limit, 8 * 2 * heads * rows / 1e9)
    out, weights = attend(
        query, keys, values, return_attn_weights=True, tmp_array_limit_gb=limit, **place
    )
    assert (out - truth).abs().max() < 1e-5
    assert (weights - sums).abs().max() < 1e-5
    assert torch.allclose(weights.sum(dim=-1), torch.tensor(float(new)), atol=1e-4)
    masked = attend_masked(query, keys, values, tmp_array_limit_gb=limit, **place)
    assert (masked - truth).abs().max() < 1e-5
    assert (attend_padded(query, keys, values, token_pos=pos) - truth).abs().max() < 1e-5


def test_padding_is_never_seen_and_sees_zeros():
    query, keys, values, pos, at = drawn(6, 20, input_pos=14)
    first = torch.tensor([0, 17])
    truth, sums = by_hand(query, keys, values, pos, at, first=(0, 17))
    place = {"token_pos": pos, "input_pos": at, "first": first}
    out, weights = attend(query, keys, values, return_attn_weights=True, **place)
    assert (out - truth).abs().max() < 1e-5
    assert (weights - sums).abs().max() < 1e-5
    assert not out[1, :, :3].any()
    assert (attend_masked(query, keys, values, **place) - truth).abs().max() < 1e-5


def test_a_sequence_attends_to_itself():
    query, keys, values, _, _ = drawn(12, 12)
    pos = torch.arange(12).expand(2, 2, 12)
    for first in (None, torch.tensor([0, 5])):
        truth, _ = by_hand(query, keys, values, pos, 0, first=(0, 0) if first is None else (0, 5))
        out = attend_causal(query, keys, values, first=first)
        real = torch.ones(2, 1, 12, 1, dtype=torch.bool)
        if first is not None:
            real[1, :, :5] = False
        assert ((out - truth) * real).abs().max() < 1e-5
        assert out.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_fp32(dtype):
    query, keys, values, pos, at = drawn(5, 30)
    half = [each.to(dtype) for each in (query, keys, values)]
    truth, _ = by_hand(*(each.float() for each in half), pos, at)
    out, weights = attend(*half, token_pos=pos, input_pos=at)
    assert out.dtype == dtype
    assert weights is None
    assert torch.equal(out, truth.to(dtype)) or (out.float() - truth).abs().max() < 1e-2


def test_what_does_not_go_together_is_refused():
    query, keys, values, pos, at = drawn(2, 10)
    with pytest.raises(ConfigError, match=r"queries \(2, 3, 2, 16\)"):
        attend(query[:, :3], keys, values, token_pos=pos, input_pos=at)
    with pytest.raises(ConfigError, match=r"positions \(2, 2, 9\) do not"):
        attend(query, keys, values, token_pos=pos[..., 1:], input_pos=at)
    with pytest.raises(ConfigError, match="the weights of one query take 6"):
        attend(query, keys, values, token_pos=pos, input_pos=at, tmp_array_limit_gb=1e-9)


def test_queries_are_padded_where_that_was_measured_to_pay(monkeypatch):
    points = [(256, 64), (1024, 64), (4096, 1024), (16_384, None)]
    assert pays("cuda", 64, 500, points)
    assert not pays("cuda", 63, 500, points)
    assert pays("cuda", 64, 100, points)
    assert pays("cuda", 2048, 8192, points[:3])  # beyond the end as large a share of the rows
    assert not pays("cuda", 2047, 8192, points[:3])
    assert pays("cuda", 257, 2048, points)  # between: by logarithms, 256 of 2048
    assert not pays("cuda", 255, 2048, points)
    assert pays("cuda", 1024, 4096, points)
    assert not pays("cuda", 8000, 8192, points)
    assert not pays("cuda", 16_384, 20_000, points)
    assert not pays("tpu", 16_384, 16_384)
    assert "cpu" in stored()
    query, keys, values, _, _ = drawn(5, 30)
    pos = torch.stack([torch.randperm(30) for _ in range(4)]).view(2, 2, 30)
    place = {"token_pos": pos, "input_pos": 25}
    truth = attend_without_weights(query, keys, values, **place)
    asked = []
    monkeypatch.setattr(attention, "pays", lambda *given: asked.append(given) is None)
    assert (attend_without_weights(query, keys, values, **place) - truth).abs().max() < 1e-5
    assert asked == [("cpu", 5, 30)]
    first = torch.tensor([0, 3])
    attend_without_weights(query, keys, values, **place, first=first)
    assert len(asked) == 1  # padding takes the mask


@pytest.mark.parametrize("padded", [False, True])
def test_masks_stay_below_the_limit(monkeypatch, padded):
    """Of kernels that weigh nothing: queries go in slices, to the same outputs."""
    masks = []
    kernel = torch.nn.functional.scaled_dot_product_attention

    def noting(*given, attn_mask=None, **more):
        if attn_mask is not None:
            # torch's kernel makes a number per head of each, and may hold it twice.
            masks.append(8 * attn_mask[:, :1].numel() * given[0].shape[1])
        return kernel(*given, attn_mask=attn_mask, **more)

    query, keys, values, pos, at = drawn(24, 60, input_pos=36)
    first = torch.tensor([0, 17]) if padded else None
    place = {"token_pos": pos, "input_pos": at, "first": first}
    truth = attend_masked(query, keys, values, **place)
    own = query[:, : keys.shape[1]]
    causal = attend_causal(own, own, own, first=first)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noting)
    limit = 8 * query.shape[0] * query.shape[1] * 60 * 5 / 1e9  # five queries
    found = attend_without_weights(query, keys, values, tmp_array_limit_gb=limit, **place)
    assert (found - truth).abs().max() < 1e-6
    assert len(masks) == 5
    found = attend_causal(own, own, own, first=first, tmp_array_limit_gb=limit)
    assert (found - causal).abs().max() < 1e-6
    assert max(masks) <= limit * 1e9
    with pytest.raises(ConfigError, match="the limit is 1e-09"):
        attend_without_weights(query, keys, values, tmp_array_limit_gb=1e-9, **place)
