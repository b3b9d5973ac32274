"""Small decoders of each kind that selective caches take, and the policies to try on them."""

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
