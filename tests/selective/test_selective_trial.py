"""Decoders that a selective cache cannot read through are refused when it is opened."""

from __future__ import annotations

import pytest
import torch
import transformers
from decoders import make, opened

from kvtrie.errors import ConfigError

ONE = {
    "vocab_size": 50, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 4, "pad_token_id": 0,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "more", "message"),
    [
        (
            "Llama4",
            {"head_dim": 16, "num_local_experts": 2, "attention_chunk_size": 8},
            "layers of kind chunked",
        ),
        ("Mamba", {}, "MambaForCausalLM is no decoder that selective caches take"),
        (
            "DeepseekV3",
            {"kv_lora_rank": 16, "q_lora_rank": 16, "n_routed_experts": 8},
            "DeepseekV3Model does not run over a selective cache: queries",
        ),
        ("OPT", {"word_embed_proj_dim": 64, "ffn_dim": 32}, "OPTDecoder has no rotary_emb"),
    ],
)
def test_decoders_of_other_kinds_are_refused(kind, more, message):
    of_text = getattr(transformers, f"{kind}TextConfig", None)
    config = (of_text or getattr(transformers, f"{kind}Config"))(**ONE | more)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with pytest.raises(ConfigError, match=message):
        opened(model)
    assert not model.get_decoder()._forward_pre_hooks


@pytest.mark.parametrize(
    ("kind", "more", "message"),
    [
        ("Doge", {"keep_window_size": 16}, "DogeAttention builds its own mask"),
        ("Doge", {"keep_window_size": 2048}, "DogeAttention builds its own mask"),
        ("DiffLlama", {}, "DiffLlama.*"),
    ],
)
def test_attention_that_is_more_than_a_causal_softmax_is_refused(kind, more, message):
    config = getattr(transformers, f"{kind}Config")(**ONE | more)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with pytest.raises(ConfigError, match=message):
        opened(model)
    assert model.config._attn_implementation != "kvtrie"
    assert not model.get_decoder()._forward_pre_hooks


def test_a_layer_that_attends_otherwise_is_seen_at_opening(monkeypatch):
    """One that scales what attention gives, whichever way its attention is called."""
    model = make()
    layer = model.model.layers[2].self_attn
    forward = type(layer).forward

    def louder(self, *given, **more):
        out, weights = forward(self, *given, **more)
        return (out * 1.5 if more.get("past_key_values") is not None else out), weights

    monkeypatch.setattr(layer, "forward", louder.__get__(layer))
    with pytest.raises(ConfigError, match="more than a causal softmax"):
        opened(model)
    monkeypatch.undo()
    opened(model).close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_is_no_difference_in_attention(dtype):
    opened(make(num_hidden_layers=8).to(dtype)).close()
