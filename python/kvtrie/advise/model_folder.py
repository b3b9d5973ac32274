"""Model folder: the shape of a model from its config.json, with a server's groups of layers.

The file is read without transformers. This module derives the layers with windows or states, and
the heads of Gemma 4's layers with full attention, which transformers' classes would fill in.
States have vLLM's sizes.
Invariant: layers of unknown kind or size are refused, never guessed. Cost: a small file.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from kvtrie.errors import ConfigError
from kvtrie.input import json_of, read_text
from kvtrie.model.layer_group import MOST_LAYERS, LayerGroup
from kvtrie.model.layout import DTYPE_BYTES
from kvtrie.model.shape import ModelShape
from kvtrie.settings.argument import few, shown, whole, word

if TYPE_CHECKING:
    from collections.abc import Container, Sequence
    from pathlib import Path

__all__ = ["folder_shape"]

_FULL, _WINDOW, _CHUNK = "full_attention", "sliding_attention", "chunked_attention"
_STATE, _NOTHING = "linear_attention", "mlp"
_KINDS = {
    **{kind: kind for kind in (_FULL, _WINDOW, _CHUNK, _STATE, _NOTHING)},
    "attention": _FULL,
    "mamba": _STATE,
    "conv": _STATE,
    "moe": _NOTHING,
}
_LETTERS = {"*": _FULL, "M": _STATE, "-": _NOTHING, "E": _NOTHING}
_EVERY = {"gemma2": 2, "gemma3_text": 6, "gemma4_text": 6, "qwen3_next": 4, "qwen3_5_text": 4}
"""Interval of layers with full attention, by model type, if a file has none."""

_STATES = ("linear_num_key_heads", "mamba_d_state", "ssm_state_size", "conv_L_cache")
_READ = (*_STATES, "layers_block_type", "attn_layer_period", "num_kv_shared_layers")
"""Fields refused by `ModelShape.from_config` and read here."""


def folder_shape(folder: Path) -> ModelShape:
    """Return the shape of the model in a folder.

    Args:
        folder: a folder with transformers' `config.json`. Only its text part is read.

    Raises:
        ConfigError: no such file, layers refused by `ModelShape.from_config`, or states of layers
            other than Gated DeltaNet, Mamba, Mamba-2 and short convolutions.
    """
    try:
        return _shape(_Config(_text_part(folder / "config.json")))
    except ConfigError as error:
        raise ConfigError(f"{error}; --bytes-per-token N does instead") from error


def _text_part(path: Path) -> dict[str, Any]:
    config = json_of(read_text(path, "the model's"), f"{path} is no JSON")
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is no JSON object")
    fields = cast("dict[str, Any]", config)
    text = fields.get("text_config", fields)
    if not isinstance(text, dict):
        raise ConfigError(f"text_config of {path} is {shown(text)}, a JSON object wanted")
    return cast("dict[str, Any]", text)


class _Config:
    """The fields of a configuration. null is no value."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.fields = {name: value for name, value in fields.items() if value is not None}
        self.type = str(self.fields.get("model_type"))

    def get(self, *names: str) -> Any:  # noqa: ANN401 - whatever the file has
        """Return the value of the first present name."""
        return next((self.fields[name] for name in names if name in self.fields), None)

    def number(self, *names: str, least: int = 1) -> int:
        """Return a number under the first present name.

        Raises:
            ConfigError: no name has a number, or it is below `least`.
        """
        return whole(f"{names[0]} of the configuration", self.get(*names), least, 2**31 - 1)


def _shape(config: _Config) -> ModelShape:
    kinds = _kinds(config)
    # Layers without KV count as full attention until the groups are known.
    attends = [_FULL if kind in (_STATE, _NOTHING) else kind for kind in kinds]
    fields = {name: value for name, value in config.fields.items() if name not in _READ}
    fields |= {"num_hidden_layers": len(kinds), "layer_types": attends}
    shape = ModelShape.from_config(SimpleNamespace(**fields))
    if config.get("num_kv_shared_layers"):  # the last layers, which read the KV of earlier layers
        own = max(0, len(kinds) - config.number("num_kv_shared_layers"))
        kinds[own:] = [_NOTHING] * (len(kinds) - own)
    groups = _groups(config, shape, kinds)
    return replace(shape, groups=() if groups == (_every(shape),) else groups)


def _every(shape: ModelShape) -> LayerGroup:
    return LayerGroup(tuple(range(shape.layers)))


def _groups(config: _Config, shape: ModelShape, kinds: Sequence[str]) -> tuple[LayerGroup, ...]:
    """Return the groups of layers, states last."""
    groups: list[LayerGroup] = []
    for group in shape.groups or (_every(shape),):
        layers = tuple(at for at in group.layers if kinds[at] not in (_STATE, _NOTHING))
        if layers:
            heads = _heads(config, layers, full=group.kind == "full")
            groups.append(replace(group, layers=layers, **heads))
    states = tuple(at for at, kind in enumerate(kinds) if kind == _STATE)
    if states:
        size = len(states) * _state_bytes(config, shape)
        groups.append(LayerGroup(states, kind="state", state_bytes=size))
    return tuple(groups)


def _kinds(config: _Config) -> list[str]:
    """Return the kind of each layer.

    Raises:
        ConfigError: an unknown kind, or a file with states but without their layers.
    """
    for name in ("layer_types", "layers_block_type"):
        if name in config.fields:
            types = few(name, config.fields[name], MOST_LAYERS)
            return [_KINDS[word(f"a layer of {name}", one, _KINDS)] for one in types]
    if (pattern := config.get("hybrid_override_pattern")) is not None:
        letters = few("hybrid_override_pattern", pattern, MOST_LAYERS)
        return [_LETTERS[word("a layer of the pattern", one, _LETTERS)] for one in letters]
    layers = whole("num_hidden_layers", config.get("num_hidden_layers"), 1, MOST_LAYERS)
    windows = config.get("sliding_window") and config.fields.get("use_sliding_window", True)
    states = config.get(*_STATES) is not None
    if not (states or windows):
        return [_FULL] * layers
    full = _full_layers(config, layers)
    if states and not full:
        raise ConfigError("the configuration does not say which layers keep states: no layer_types")
    return [_FULL if at in full else _STATE if states else _WINDOW for at in range(layers)]


def _full_layers(config: _Config, layers: int) -> Container[int]:
    """Return the layers with full attention, in a model with equal remaining layers."""
    if (indices := config.get("attn_layer_indices")) is not None:
        return few("attn_layer_indices", indices, MOST_LAYERS)
    if "attn_layer_period" in config.fields:
        offset = config.number("attn_layer_offset", least=0)
        return range(offset, layers, config.number("attn_layer_period"))
    if "max_window_layers" in config.fields:
        return range(config.number("max_window_layers", least=0))
    stated = ("full_attention_interval", "sliding_window_pattern")
    step = _EVERY.get(config.type)
    if config.get(*stated) is not None:
        step = config.number(*stated)
    return range(step - 1, layers, step) if step else ()


def _heads(config: _Config, layers: Sequence[int], *, full: bool) -> dict[str, int]:
    """Return the heads of a group of layers, if different from the model's.

    Raises:
        ConfigError: heads of its layers differ.
    """
    if (stated := config.get("per_layer_config")) is not None:
        own = [_layer_heads(stated, at) for at in layers]
        if any(one != own[0] for one in own):
            raise ConfigError(f"per_layer_config gives heads of one kind of layers as {shown(own)}")
        return own[0]
    return _global_heads(config) if full and config.type == "gemma4_text" else {}


def _layer_heads(stated: object, layer: int) -> dict[str, int]:
    if not isinstance(stated, dict):
        raise ConfigError(f"per_layer_config is {shown(stated)}, a JSON object wanted")
    fields = cast("dict[str, Any]", stated).get(str(layer), {})
    if not isinstance(fields, dict):
        raise ConfigError(f"per_layer_config of layer {layer} is {shown(fields)}")
    own = _Config(cast("dict[str, Any]", fields))
    names = {"kv_heads": "num_key_value_heads", "head_dim": "head_dim"}
    return {ours: own.number(name) for ours, name in names.items() if name in own.fields}


def _global_heads(config: _Config) -> dict[str, int]:
    """Return the heads of Gemma 4's layers with full attention in an original config.json."""
    heads = {"head_dim": 512}
    if config.get("global_head_dim") is not None:
        heads["head_dim"] = config.number("global_head_dim")
    if config.get("attention_k_eq_v") and config.get("num_global_key_value_heads"):
        heads["kv_heads"] = config.number("num_global_key_value_heads")
    return heads


def _state_bytes(config: _Config, shape: ModelShape) -> int:
    """Return the bytes of a layer's state over all ranks: convolution rows and recurrent state.

    Raises:
        ConfigError: a number is missing.
    """
    number = config.number
    recurrent = 0
    if config.get("linear_num_key_heads") is not None:
        key = number("linear_key_head_dim")
        values = number("linear_num_value_heads") * number("linear_value_head_dim")
        rows = number("linear_conv_kernel_dim")
        row, recurrent = 2 * key * number("linear_num_key_heads") + values, values * key
    elif config.get("mamba_d_state", "ssm_state_size") is not None:
        state = number("mamba_d_state", "ssm_state_size")
        rows, row = number("mamba_d_conv", "conv_kernel"), _inner(config)
        recurrent = row * state
        if config.get("mamba_n_heads", "mamba_num_heads") is not None:  # Mamba-2
            row += 2 * number("mamba_n_groups", "n_groups") * state
    else:
        rows, row = number("conv_L_cache"), number("hidden_size")
    dtype = config.get("mamba_ssm_dtype", "mamba_ssm_cache_dtype")
    if dtype is None:
        dtype = "float32" if config.type == "nemotron_h" else shape.dtype
    word("dtype of the states", dtype, DTYPE_BYTES)
    return (rows - 1) * row * DTYPE_BYTES[shape.dtype] + recurrent * DTYPE_BYTES[dtype]


def _inner(config: _Config) -> int:
    """Width of a Mamba layer."""
    width = config.get("mamba_d_head", "mamba_head_dim")
    if isinstance(width, int) and width > 0:
        return width * config.number("mamba_n_heads", "mamba_num_heads")
    return config.number("mamba_expand", "expand") * config.number("hidden_size")
