"""Decoder caches: a cache for each layer of a supported model.

Invariant: an unsupported model is refused without changes to it. Cost: the memory of the caches.
"""

# pyright: reportUnknownMemberType=false
# (transformers leaves parts untyped)

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from kvtrie.errors import ConfigError
from kvtrie.model.shape import ModelShape
from kvtrie.selective.buffers import WorkingCopy
from kvtrie.selective.names import make_cache, windows_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvtrie.selective.buffered import KVCacheWithBuffers
    from kvtrie.selective.settings import CacheSettings

__all__ = ["decoder_caches"]


def decoder_caches(
    model: PreTrainedModel, settings: CacheSettings, batch: int, limit_gb: float
) -> list[KVCacheWithBuffers]:
    """Make the cache of each layer of a model.

    Args:
        model: the decoder.
        settings: policy, buffers and rows.
        batch: batch rows.
        limit_gb: bound of attention's temporary arrays, in 10^9 bytes.

    Raises:
        ConfigError: invalid settings, or a model with unsupported layers.
    """
    shape = _shape(model)
    lengths = settings.cache_length
    if isinstance(lengths, int):
        lengths = [lengths] * shape.layers
    if len(lengths) != shape.layers:
        raise ConfigError(f"{len(lengths)} cache lengths for a model of {shape.layers} layers")
    working = WorkingCopy()
    windows = windows_of(shape)
    return [
        make_cache(
            settings.name,
            batch=batch,
            kv_heads=shape.kv_heads,
            query_heads=shape.query_heads or shape.kv_heads,
            cache_length=length,
            head_dim=shape.head_dim,
            dtype=model.dtype,
            device=model.device,
            span=windows.get(at),
            working=working,
            tmp_array_limit_gb=limit_gb,
            **settings.cache_kwargs,
        )
        for at, length in enumerate(lengths)
    ]


def _shape(model: PreTrainedModel) -> ModelShape:
    try:
        shape = ModelShape.from_config(model.config)
    except ConfigError as error:
        raise ConfigError(
            f"{type(model).__name__} is no decoder that selective caches take, such as Llama's, "
            f"Mistral's, Qwen's, Gemma's and gpt-oss's: {error}"
        ) from error
    kinds = sorted({group.kind for group in shape.groups} - {"full", "sliding"})
    decoder: Any = cast("Any", model).get_decoder()
    name = type(decoder).__name__
    if kinds or shape.latent:
        raise ConfigError(
            f"{name} has layers of kind {', '.join(kinds) or 'latent'}: selective caches choose "
            "among all tokens of layers with full attention, and keep windows"
        )
    if not hasattr(decoder, "rotary_emb") or not getattr(model, "_supports_attention_backend", 0):
        raise ConfigError(
            f"{name} has no rotary_emb, or attention that cannot be exchanged: selective caches "
            "take decoders like Llama's, Mistral's, Qwen's, Gemma's and gpt-oss's"
        )
    return shape
