"""Small decoders that selective caches take, their prompts and answers, and the policies to try."""

from __future__ import annotations

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
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

COMMON = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "initializer_range": 0.15,  # wide, so that logits depend on every key
    "max_position_embeddings": 512,
    "pad_token_id": 0,
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
TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
WINDOW = 9
_SPAN = {"sliding_window": WINDOW, "head_dim": 16, "layer_types": TYPES}
WINDOWED = {
    "gemma2": (
        Gemma2Config,
        Gemma2ForCausalLM,
        {**_SPAN, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM, _SPAN),
    "gpt_oss": (
        GptOssConfig,
        GptOssForCausalLM,
        {**_SPAN, "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
    "mistral with windows": (MistralConfig, MistralForCausalLM, {"sliding_window": WINDOW}),
}
"""Decoders some or all of whose layers have a window."""
POLICIES = (
    "lastrec", "h2o", "h2o-vlen", "h2o-orig", "keydiff", "knorm", "tova", "snapkv", "expected",
    "h2o-decay", "random", "mix-h2o+keydiff",
)  # fmt: skip
CODED = ("qh2o", "qh2o-vlen")
"""Policies that weigh the errors of codes."""


def make(kind="llama", kv_heads=2, seed=0, **more):
    """A random decoder in evaluation mode."""
    config, model, extra = {**KINDS, **WINDOWED}[kind]
    torch.manual_seed(seed)
    return model(config(num_key_value_heads=kv_heads, **{**COMMON, **extra, **more})).eval()


def tokens(seed, *shape):
    """A prompt of ids that are no padding, int64 of this shape."""
    return torch.randint(1, 211, shape, generator=torch.Generator().manual_seed(seed))


def answer(model, ids, **more):
    """The model's own greedy answer of eight tokens, after the prompt."""
    more = {"max_new_tokens": 8, "do_sample": False} | more
    more.setdefault("attention_mask", torch.ones_like(ids))
    return model.generate(ids, **more)


def opened(model, name="h2o-default", **more):
    """A cache of sixteen rows per layer."""
    return SelectiveCache(model, CacheSettings(name, **{"cache_length": 16, **more}))
