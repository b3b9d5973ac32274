"""The oracle of gradients: a policy's decisions as masks, and torch's own autograd under them."""

from __future__ import annotations

import random

import torch
from transformers import (
    AttentionInterface,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from kvtrie.selective import CacheSettings, SelectiveCache
from kvtrie.train import IGNORED, GradientSettings, LongContextGradients, make_head

COMMON = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "initializer_range": 0.15,  # wide, so that losses depend on every key
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "dtype": "float32",
}
KINDS = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16}),
}
POLICIES = (
    "lastrec", "h2o", "h2o-vlen", "h2o-orig", "keydiff", "knorm", "tova", "snapkv", "expected",
    "h2o-decay", "random", "mix-h2o+keydiff",
)  # fmt: skip
CODED = ("qh2o", "qh2o-vlen")


def make(kind="llama", kv_heads=2, seed=0, **more):
    config, model, extra = KINDS[kind]
    torch.manual_seed(seed)
    return model(config(num_key_value_heads=kv_heads, **{**COMMON, **extra, **more})).eval()


def drawn(seed, size=2, total=50, vocabulary=97):
    return torch.randint(vocabulary, (size, total), generator=torch.Generator().manual_seed(seed))


def parts(model):
    """The model without what peft wraps around it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def decisions(model, settings, ids, mask=None):
    """Per layer, what each query sees, which of it is of its own step, and how rows are rounded."""
    base, total = parts(model), ids.shape[1]
    seen, beside = [], []
    with SelectiveCache(base, settings, len(ids)) as cache:
        for layer in cache.caches:
            views = []
            seen.append(views)

            def forward(query, key, value, layer=layer, views=views, ran=layer.forward):
                out = ran(query, key, value)
                pos, new = layer.token_pos, key.shape[2]
                now = torch.arange(layer.input_pos - new, layer.input_pos)
                view = torch.zeros(*pos.shape[:2], 1, total, dtype=torch.bool)
                view.scatter_(3, pos[:, :, None], value=True)
                view = view & (torch.arange(total) <= now[:, None])
                if layer.first is not None:
                    view &= torch.arange(total) >= layer.first[:, None, None, None]
                views.append(view)
                if layer is cache.caches[0]:
                    inside = torch.zeros(new, total, dtype=torch.bool)
                    inside[:, now[0] : now[-1] + 1] = True
                    beside.append(inside)
                return out

            layer.forward = forward
        cache.read(ids, mask)
        buffers = cache.caches[0].buffers
        rounded = None if buffers.exact else buffers.rounded
    return [torch.cat(views, dim=2) for views in seen], torch.cat(beside), rounded


def plain(model, ids, found, mask=None, *, hidden=False):
    """Logits, or the last layer's outputs, of one pass under masks."""
    masks, beside, rounded = found

    def spread(x, query):
        return x.repeat_interleave(query.shape[1] // x.shape[1], dim=1)

    def masked(module, query, key, value, _, scaling=None, **__):
        view = spread(masks[module.layer_idx], query)
        pair = []
        for x in (key, value):
            exact = spread(x, query)
            coded = exact if rounded is None else spread(x + (rounded(x) - x).detach(), query)
            pair.append((exact, coded))
        (key, old_key), (value, old_value) = pair
        scores = torch.where(beside, query @ key.mT, query @ old_key.mT) * scaling
        weights = scores.masked_fill(~view, -1e30).softmax(dim=-1)
        weights = weights * view.any(dim=-1, keepdim=True)
        out = (weights * beside) @ value + (weights * ~beside) @ old_value
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register("masked-in-training", masked)
    base = parts(model)
    before = base.config._attn_implementation
    base.config._attn_implementation = "masked-in-training"
    places = None if mask is None else (mask.cumsum(1) - 1).clamp(min=0)
    try:
        out = base(ids, position_ids=places, use_cache=False, output_hidden_states=hidden)
        return out.hidden_states[-1] if hidden else out.logits
    finally:
        base.config._attn_implementation = before


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


def settled(name, seed, *, layers=3, **more):
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
