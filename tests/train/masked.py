"""The oracle of gradients: a policy's decisions as masks, and torch's own autograd under them."""

from __future__ import annotations

import random

import torch
from tests.selective import decoders
from tests.selective.decoders import CODED, KINDS, POLICIES, WINDOWED
from tests.selective.sight import under, watch, weighed

from kvtrie.selective import CacheSettings, SelectiveCache
from kvtrie.train import IGNORED, GradientSettings, LongContextGradients, make_head

__all__ = ["CODED", "KINDS", "POLICIES", "WINDOWED"]

SMALL = {"vocab_size": 97, "intermediate_size": 48, "pad_token_id": None}


def make(kind="llama", kv_heads=2, seed=0, **more):
    """A decoder of few words, so that gradients of all are quickly compared."""
    return decoders.make(kind, kv_heads, seed, **SMALL | more)


def drawn(seed, size=2, total=50, vocabulary=97):
    return torch.randint(vocabulary, (size, total), generator=torch.Generator().manual_seed(seed))


def parts(model):
    """The model without what peft wraps around it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def decisions(model, settings, ids, mask=None):
    """Per layer, what each query sees, which of it is of the query's step, and how rows are
    rounded."""
    with SelectiveCache(parts(model), settings, len(ids)) as cache:
        seen = watch(cache, ids.shape[1])
        cache.read(ids, mask)
    masks = [torch.cat(sight.masks, dim=2) for sight in seen]
    return masks, torch.cat(seen[0].own), None if seen[0].exact else seen[0].rounded


def plain(model, ids, found, mask=None, *, hidden=False):
    """Logits, or the last layer's outputs, of one pass under masks."""
    masks, beside, rounded = found

    def spread(x, query):
        return x.repeat_interleave(query.shape[1] // x.shape[1], dim=1)

    def masked(module, query, key, value, _, scaling=None, softcap=None, s_aux=None, **__):
        view = spread(masks[module.layer_idx], query)
        pair = []
        for x in (key, value):
            exact = spread(x, query)
            coded = exact if rounded is None else spread(x + (rounded(x) - x).detach(), query)
            pair.append((exact, coded))
        (key, old_key), (value, old_value) = pair
        scores = torch.where(beside, query @ key.mT, query @ old_key.mT) * scaling
        # Padding, which sees nothing, sees itself instead of nothing at all, without effect.
        blind = ~view.any(dim=-1, keepdim=True) & torch.eye(view.shape[2], dtype=torch.bool)
        weights = weighed(scores, view | blind, softcap, s_aux)
        weights = weights * view.any(dim=-1, keepdim=True)
        out = (weights * beside) @ value + (weights * ~beside) @ old_value
        return out.transpose(1, 2).contiguous(), None

    places = None if mask is None else (mask.cumsum(1) - 1).clamp(min=0)

    def run():
        out = base(ids, position_ids=places, use_cache=False, output_hidden_states=hidden)
        return out.hidden_states[-1] if hidden else out.logits

    base = parts(model)
    return under(base, masked, run)


def entropy(logits, targets):
    """Cross entropy by torch: each row's mean over its targets, then over rows."""
    last = logits[:, logits.shape[1] - targets.shape[1] :]
    rows = [
        torch.nn.functional.cross_entropy(row, target, ignore_index=IGNORED)
        for row, target in zip(last, targets, strict=True)
    ]
    return torch.stack(rows).mean()


def grads(*modules):
    """Gradients by name, and none are left."""
    found = {}
    for at, module in enumerate(modules):
        for name, weight in module.named_parameters():
            if weight.grad is not None:
                found[f"{at}.{name}"] = weight.grad
                weight.grad = None
    return found


def worst(mine, truth):
    assert mine.keys() == truth.keys()
    assert mine
    return max((mine[name] - truth[name]).abs().max().item() for name in truth)


def drawn_settings(name, seed, *, layers=3, **more):
    """Settings with drawn lengths of rows and steps."""
    draw = random.Random(f"{name} {seed}")
    length = draw.choice([11, 14, 20])
    lengths = [length + draw.randint(0, 3) for _ in range(layers)] if seed % 3 == 2 else length
    return CacheSettings(
        name,
        cache_length=lengths,
        chunk_size=draw.randint(1, 8),
        randomize_chunk_sizes=draw.random() < 0.5,
        seed=seed,
        cache_kwargs=more,
    )


def compare(model, settings, seed, grad=None, *, padded=False, width=None, total=50):
    """The worst difference of loss and of any gradient from torch's own."""
    ids = drawn(seed, total=total)
    targets = drawn(seed + 1000, total=width or total)
    mask = None
    if padded:
        mask = torch.ones_like(ids)
        mask[1, :7] = 0
        targets[1, : max(0, targets.shape[1] - total + 7)] = IGNORED
    truth = entropy(plain(model, ids, decisions(model, settings, ids, mask), mask), targets)
    truth.backward()
    expected = grads(model)
    tool = LongContextGradients(
        model, make_head("next_token_prediction", model), settings, grad or GradientSettings()
    )
    loss = tool.gradients(ids, targets, attention_mask=mask)
    found = worst(grads(model), expected)
    return max(found, abs(loss.item() - truth.item()))


def ran(model, settings, grad=None, *, scale=1.0, width=30):
    tool = LongContextGradients(model, make_head("next_token_prediction", model), settings, grad)
    ids = drawn(3, total=60)
    return tool.gradients(ids, ids[:, -width:], scale), grads(model), tool
