"""Fields of models, configurations and classes excluded from names of KV, with reasons.

All further contents of a module, its configuration or its class are part of a model's
`fingerprint`. A field added by a new version is included until it is listed here.
Invariant: a listed field cannot change the K and V of tokens, or a pass depending on it is refused.
Cost: a lookup.
"""

from __future__ import annotations

from types import ModuleType
from typing import Final

from transformers import PreTrainedConfig

__all__ = ["CLASSES", "CONFIGS", "MODULES", "TORCH_MODULE_FIELDS", "excluded", "follows_length"]

TORCH_MODULE_FIELDS: Final = {
    "_backward_hooks": "gradients: passes with them are refused",
    "_backward_pre_hooks": "gradients: passes with them are refused",
    "_buffers": "walked: each tensor is named by its bytes",
    "_compiled_call_impl": "torch.compile: the same operations, rounded by other kernels",
    "_forward_hooks": "hooks that are not known to be harmless are refused",
    "_forward_hooks_always_called": "hooks that are not known to be harmless are refused",
    "_forward_hooks_with_kwargs": "hooks that are not known to be harmless are refused",
    "_forward_pre_hooks": "hooks that are not known to be harmless are refused",
    "_forward_pre_hooks_with_kwargs": "hooks that are not known to be harmless are refused",
    "_is_full_backward_hook": "gradients: passes with them are refused",
    "_load_state_dict_post_hooks": "loading: the tensors that it left are named",
    "_load_state_dict_pre_hooks": "loading: the tensors that it left are named",
    "_modules": "walked: each module is described",
    "_non_persistent_buffers_set": "saving",
    "_parameters": "walked: each tensor is named by its bytes",
    "_state_dict_hooks": "saving",
    "_state_dict_pre_hooks": "saving",
    "training": "passes in training mode are refused",
}
"""Attributes of every torch module."""

MODULES: Final = {
    "_ep_plan": "how weights are distributed: the tensors that a process has are named",
    "_fsdp_plan": "how weights are distributed: the tensors that a process has are named",
    "_gradient_checkpointing_func": "training",
    "_hf_hook": "accelerate's placement of weights on devices; other hooks are refused",
    "_hf_peft_config_loaded": "adapters are described where their tensors are",
    "_is_hf_initialized": "loading",
    "_keep_in_fp32_modules": "loading: the tensors that it left are named",
    "_keep_in_fp32_modules_strict": "loading: the tensors that it left are named",
    "_keys_to_ignore_on_load_missing": "loading",
    "_keys_to_ignore_on_load_unexpected": "loading",
    "_keys_to_ignore_on_save": "saving",
    "_loss_function": "training",
    "_no_split_modules": "placement on devices",
    "_output_capturing_hooks_installed": "what a pass returns",
    "_pp_plan": "how weights are distributed: the tensors that a process has are named",
    "_require_grads_hook": "training",
    "_require_grads_hooks": "training",
    "_skip_keys_device_placement": "placement on devices",
    "_tied_weights_keys": "saving",
    "_tp_plan": "how weights are distributed: the tensors that a process has are named",
    "_use_kernels": "the forwards that kernels of the hub have replaced are described",
    "_weight_conversions": "saving",
    "all_tied_weights_keys": "saving",
    "generate": "makes passes, and is no part of one",
    "generation_config": "chooses tokens from logits",
    "gradient_checkpointing": "training",
    "hf_device_map": "placement on devices",
    "loss_function": "training",
    "loss_type": "training",
    "name_or_path": "where the model was loaded from",
    "peft_config": "how adapters were made: their tensors and numbers are described in the layers",
    "prepare_inputs_for_generation": "makes the arguments of passes, which are looked at",
    "warnings_issued": "logging",
}
"""Attributes of models and of the layers of transformers and PEFT."""

CONFIGS: Final = {
    "_commit_hash": "where the configuration was loaded from",
    "_name_or_path": "where the configuration was loaded from",
    "_output_attentions": "what a pass returns",
    "_post_init_done": "loading",
    "architectures": "which class a file is of: the class of the model is described",
    "dtype": "what weights are loaded as: each tensor is named with its own type",
    "model_type": "which class a file is of: the class of the model is described",
    "output_attentions": "what a pass returns",
    "output_hidden_states": "what a pass returns",
    "return_dict": "what a pass returns",
    "torch_dtype": "what weights are loaded as: each tensor is named with its own type",
    "transformers_version": "which version wrote a file: the installed one is named",
    "use_cache": "what a pass returns",
}
"""Fields of a `PreTrainedConfig`."""

CLASSES: Final = {
    "_can_set_attn_implementation_cached_value": "a result that transformers keeps",
    "_can_set_experts_implementation_cached_value": "a result that transformers keeps",
    "_is_ds_init_called": "loading",
    "generate": "makes passes, and is no part of one",
}
"""Members of classes and of Python modules."""

_EVERYWHERE = TORCH_MODULE_FIELDS | MODULES


def excluded(owner: object, name: str) -> bool:
    """Return whether an attribute is in the list for its owner."""
    if isinstance(owner, (type, ModuleType)):
        return name in CLASSES
    return name in (CONFIGS if isinstance(owner, PreTrainedConfig) else _EVERYWHERE)


def follows_length(rope_type: object, name: str) -> bool:
    """Return whether an attribute of a rotary module follows the length of the last pass.

    Dynamic RoPE and LongRoPE keep the frequencies of the last pass in the module. Their original
    frequencies are a separate attribute. The scopes of `RopeLimits` keep their KV apart.
    """
    kind = str(rope_type)
    moves = "dynamic" in kind or "longrope" in kind
    return moves and name.endswith(_MOVING) and "original" not in name


_MOVING = ("inv_freq", "max_seq_len_cached")
