"""Reads the shape of a model's KV from its transformers configuration.

Invariant: an attribute of a structure other than plain K and V of every layer is refused by name.
Cost: a few attributes are read, without importing transformers.
"""

from __future__ import annotations

from typing import Any

from kvtrie.errors import ConfigError
from kvtrie.model.layer_group import LayerGroup

__all__ = ["groups_of", "kv_heads_of", "latent_of", "number_of", "refuse_unknown"]

_KIND_OF = {
    "full_attention": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "chunked",
}
# Attributes of configurations with more than plain K and V of every layer.
_UNKNOWN = (
    "kv_lora_rank",
    "num_kv_shared_layers",
    "is_encoder_decoder",
    "layers_block_type",
    "block_types",
    "attn_layer_period",
    "ssm_cfg",
    "mamba_d_state",
    "linear_num_key_heads",
)


def refuse_unknown(config: Any) -> None:  # noqa: ANN401 - a PretrainedConfig
    """Raise on a configuration with more than plain K and V of every layer.

    Raises:
        ConfigError: the configuration has an attribute of an unsupported structure.
    """
    strange = [name for name in _UNKNOWN if getattr(config, name, None)]
    if latent_of(config) is not None:
        strange.remove("kv_lora_rank")
    if strange:
        settings = ", ".join(f"{name}={getattr(config, name)!r}" for name in strange)
        raise ConfigError(
            f"a configuration with {settings} does not say what its layers keep: take "
            "kvtrie.engines.transformers.model_shape(model), or write the ModelShape by hand"
        )
    if getattr(config, "is_heterogeneous", False):
        raise ConfigError("layers of different sizes are not supported")


def latent_of(config: Any) -> tuple[int, int] | None:  # noqa: ANN401 - a PretrainedConfig
    """Return the two widths of the row per token in latent attention, or None without it."""
    widths = (getattr(config, "kv_lora_rank", None), getattr(config, "qk_rope_head_dim", None))
    first, second = widths
    return (first, second) if isinstance(first, int) and isinstance(second, int) else None


def number_of(config: Any, name: str) -> int:  # noqa: ANN401
    """Return a required number of a configuration.

    Raises:
        ConfigError: the number is missing.
    """
    value = getattr(config, name, None)
    if not isinstance(value, int):
        raise ConfigError(f"the configuration has no {name}: it says {value!r}")
    return value


def kv_heads_of(config: Any, query_heads: int) -> int:  # noqa: ANN401
    """Return the number of cached K and V heads."""
    stated = getattr(config, "num_key_value_heads", None)
    # Falcon's names. Its new decoder repeats K and V for each query before caching.
    if stated is None and getattr(config, "multi_query", False):
        return query_heads if getattr(config, "new_decoder_architecture", False) else 1
    return stated or query_heads


def groups_of(config: Any, layers: int) -> tuple[LayerGroup, ...]:  # noqa: ANN401
    """Return layers by kind of attention, empty if all layers attend to all tokens.

    Raises:
        ConfigError: an unknown kind of layer, or a wrong number of kinds.
    """
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if types is None:
        sliding = bool(window) and getattr(config, "use_sliding_window", True)
        types = ["sliding_attention" if sliding else "full_attention"] * layers
    if len(types) != layers:
        raise ConfigError(f"layer_types names {len(types)} layers of {layers}")
    unknown = sorted(set(types) - set(_KIND_OF))
    if unknown:
        raise ConfigError(f"layers of type {', '.join(unknown)} are not supported")
    if set(types) == {"full_attention"}:
        return ()
    windows = {
        "full_attention": 0,
        "sliding_attention": window or 0,
        "chunked_attention": getattr(config, "attention_chunk_size", None) or 0,
    }
    return tuple(
        LayerGroup(
            layers=tuple(at for at, kind in enumerate(types) if kind == name),
            kind=_KIND_OF[name],  # pyright: ignore[reportArgumentType]
            window=windows[name],
        )
        for name in _KIND_OF
        if name in types
    )
