"""Rows that each query saw of a selective cache, and the numbers kept of each token.

A policy is a mask per layer and head; a cache of codes also replaces rows of other steps than the
query's by decoded ones. Both are noted here from outside, pass by pass, for a dense
pass whose logits are compared with those of the cache.
"""

from __future__ import annotations

import random

import torch
from tests.selective.decoders import tokens
from transformers import AttentionInterface

from kvtrie.selective import CacheSettings, SelectiveCache


class Sight:
    """Of one layer: masks `(batch, kv_heads, m, total)` by pass, and K and V that codes say."""

    def __init__(self, layer, total):
        self.layer, self.total = layer, total
        self.masks = []
        self.own = []  # bool (m, total): which columns are of the query's own step
        shape = (layer.batch, layer.kv_heads, total)
        self.known = torch.zeros(shape, dtype=torch.bool)
        self.kept = torch.zeros(2, *shape, layer.head_dim)
        self.exact = layer.buffers.exact
        self.rounded = layer.buffers.rounded

    def note(self, new):
        """Look at the layer after a step of `new` tokens."""
        layer, pos, columns = self.layer, self.layer.token_pos, torch.arange(self.total)
        now = torch.arange(layer.input_pos - new, layer.input_pos)[:, None]
        if layer.span is None:
            mask = torch.zeros(*pos.shape[:2], 1, self.total, dtype=torch.bool)
            mask = mask.scatter_(3, pos[:, :, None], value=True) & (columns <= now)
        else:  # what leaves a window within a step was seen by the step's first queries
            mask = (columns <= now) & (columns > now - layer.span)
            mask = mask.expand(*pos.shape[:2], *mask.shape)
        if layer.first is not None:
            mask = mask & (columns >= layer.first[:, None, None, None])
        self.masks.append(mask)
        self.own.append((columns >= now[0]) & (columns <= now[-1]) & torch.ones_like(now > 0))
        if not self.exact:
            for plane, rows in zip(self.kept, layer.keys_values(), strict=True):
                index = pos[..., None].expand_as(rows)
                before = self.known.gather(2, pos)[..., None]
                same = plane.gather(2, index) == rows
                assert (same | ~before).all()  # kept rows stay the same bits
                plane.scatter_(2, index, rows)
            self.known.scatter_(2, pos, value=True)


def watch(cache, total):
    """A `Sight` of each layer, which fills as the cache is read up to `total` tokens."""
    seen = [Sight(layer, total) for layer in cache.caches]
    for sight in seen:

        def forward(query, key, value, sight=sight, ran=sight.layer.forward):
            out = ran(query, key, value)
            sight.note(key.shape[2])
            return out

        sight.layer.forward = forward
    return seen


def under(model, attention, run):
    """Result of `run` while an attention function replaces the model's."""
    AttentionInterface.register("in-a-test", attention)
    before = model.config._attn_implementation
    model.config._attn_implementation = "in-a-test"
    try:
        return run()
    finally:
        model.config._attn_implementation = before


def weighed(scores, mask, softcap, sinks):
    """The softmax of scaled products, with what Gemma 2 and gpt-oss add to it."""
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is None:
        return scores.softmax(dim=-1)
    column = sinks[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat((scores, column), dim=-1).softmax(dim=-1)[..., :-1]


@torch.no_grad()
def dense(model, ids, seen, position_ids=None):
    """Logits of one pass under the masks, over what was kept where that is not exact.

    Kept rows must be as near to the pass's own numbers as their codes are: on the border of
    two codes it may be either.
    """
    masks = [torch.cat(sight.masks, dim=2) for sight in seen]
    shown = [mask.any(dim=2)[..., None] for mask in masks]  # no query sees padding
    own = torch.cat(seen[0].own)

    def masked(module, query, key, value, _, scaling=None, softcap=None, s_aux=None, **__):
        sight, each = seen[module.layer_idx], query.shape[1] // key.shape[1]
        old = (key, value) if sight.exact else sight.kept
        for mine, kept in zip((key, value), old, strict=True):
            off = (sight.rounded(mine) - mine).abs()
            close = (kept - mine).abs() <= off + 1e-4
            assert (close | ~shown[module.layer_idx]).all()
        key, value, old_key, old_value, mask = (
            x.repeat_interleave(each, dim=1) for x in (key, value, *old, masks[module.layer_idx])
        )
        scores = torch.where(own, query @ key.mT, query @ old_key.mT) * scaling
        weights = weighed(scores, mask, softcap, s_aux).nan_to_num(0.0)
        out = (weights * own) @ value + (weights * ~own) @ old_value
        return out.transpose(1, 2).contiguous(), None

    return under(
        model, masked, lambda: model(ids, position_ids=position_ids, use_cache=False).logits
    )


def passes(model, cache, ids, draw, mask=None):
    """Logits of all tokens, read in passes of any allowed length."""
    logits = []
    columns = None if mask is None else (mask.long().cumsum(1) - 1).clamp(min=0)
    while (at := cache.get_seq_length()) < ids.shape[1]:
        new = min(ids.shape[1] - at, draw.randint(1, cache.largest_step))
        given = {}
        if mask is not None:
            given = {
                "attention_mask": mask[:, : at + new],
                "position_ids": columns[:, at : at + new],
            }
        with torch.no_grad():
            out = model(ids[:, at : at + new], past_key_values=cache, **given)
        logits.append(out.logits)
    return torch.cat(logits, dim=1)


def equal_under_masks(
    model, policy, seed, *, buffers="default", padded=False, layer=0, **arguments
):
    """A read in drawn passes and one dense pass under what each query saw: the same logits."""
    ids = tokens(seed, 2, 50)
    mask = None
    if padded:
        mask = torch.ones_like(ids)
        mask[1, :7] = 0
    settings = CacheSettings(f"{policy}-{buffers}", cache_length=14, cache_kwargs=arguments)
    with SelectiveCache(model, settings, 2) as cache:
        seen = watch(cache, ids.shape[1])
        mine = passes(model, cache, ids, random.Random(seed), mask)
    positions = None if mask is None else (mask.cumsum(1) - 1).clamp(min=0)
    truth = dense(model, ids, seen, positions)
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    assert (mine - truth)[real].abs().max() < 1e-4
    hidden = ~seen[layer].masks[-1][0, 0, -1]
    assert hidden.any()  # so the mask is not the causal one
