"""Families of models with different kinds of layers, as tiny random models.

Each has at least two kinds of layers, like the published models of its family.
Invariant: a family's model is the same in every process. Cost: at most 200,000 parameters each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
import transformers

from kvtrie.settings.argument import word

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["FAMILIES", "VOCABULARY", "family"]

VOCABULARY = 128
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,  # wide, so that logits depend on every key
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
_SLIDING, _FULL = "sliding_attention", "full_attention"
_PER_LAYER = {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES: dict[str, tuple[str, str, dict[str, object]]] = {
    "gemma-3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "sliding_window": 9,
            "layer_types": [_SLIDING, _SLIDING, _FULL, _SLIDING],
        },
    ),
    "gemma-4": (
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        {
            "head_dim": 8,
            "global_head_dim": 16,
            "sliding_window": 9,
            "num_kv_shared_layers": 0,
            "layer_types": [_SLIDING, _SLIDING, _FULL, _FULL],
            **_PER_LAYER,
        },
    ),
    "gemma-4-shared": (
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        {
            "num_hidden_layers": 6,
            "head_dim": 8,
            "global_head_dim": 16,
            "sliding_window": 9,
            "num_kv_shared_layers": 2,
            "layer_types": [_SLIDING, _SLIDING, _FULL, _SLIDING, _SLIDING, _FULL],
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            **_PER_LAYER,
        },
    ),
    "gpt-oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {"head_dim": 8, "sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "mimo-v2-flash": (
        "MiMoV2FlashConfig",
        "MiMoV2FlashForCausalLM",
        {
            "head_dim": 12,
            "v_head_dim": 8,
            "sliding_window": 9,
            "n_routed_experts": 4,
            **_EXPERTS,
        },
    ),
    "deepseek-v3": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {
            "num_key_value_heads": 4,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            **_EXPERTS,
        },
    ),
    "qwen3-next": (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {
            "head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "num_experts": 4,
            "shared_expert_intermediate_size": 16,
            **_EXPERTS,
        },
    ),
    "lfm2": (
        "Lfm2Config",
        "Lfm2ForCausalLM",
        {
            "layer_types": ["conv", _FULL, "conv", _FULL],
            "conv_L_cache": 3,
            "block_auto_adjust_ff_dim": False,
        },
    ),
    "falcon-h1": (
        "FalconH1Config",
        "FalconH1ForCausalLM",
        {
            "head_dim": 8,
            "mamba_d_ssm": 32,
            "mamba_n_heads": 4,
            "mamba_d_head": 8,
            "mamba_n_groups": 1,
            "mamba_d_state": 8,
            "mamba_chunk_size": 8,
            "mamba_expand": 1,
        },
    ),
    "nemotron-h": (
        "NemotronHConfig",
        "NemotronHForCausalLM",
        {
            "head_dim": 8,
            "layers_block_type": ["mamba", "attention", "mlp", "mamba"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 8,
            "n_groups": 1,
            "ssm_state_size": 8,
            "conv_kernel": 4,
            "chunk_size": 8,
            "expand": 1,
        },
    ),
}
"""By name: classes of the configuration and the model, and the family's own settings."""


def family(name: str) -> PreTrainedModel:
    """Return a model of a family, in evaluation mode and float32.

    Raises:
        ConfigError: an unknown name. The message lists the known names.
    """
    config, model, own = FAMILIES[word("family", name, FAMILIES)]
    cast("Any", torch).manual_seed(1)
    library: Any = cast("Any", transformers)
    made = getattr(library, config)(**{**_COMMON, **own, "dtype": "float32"})
    return getattr(library, model)(made).eval()
