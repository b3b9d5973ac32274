"""ServedModel: the KV of the model that a server serves, as both halves of the connector see it.

Configurations that kvtrie cannot serve correctly are refused here, at start.
Invariant: all processes of a server derive the same model from one configuration.
Cost: none per step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvtrie.errors import ConfigError
from kvtrie.model.shape import ModelShape

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig

__all__ = ["ServedModel", "window_cost"]

_SPECS = ("FullAttentionSpec", "MLAAttentionSpec")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The shape and place of a server's KV.

    Attributes:
        shape: of the layers of this process's pipeline stage, with its tensor-parallel ranks.
        block_tokens: tokens per block, vLLM's own.
        blocks: blocks of vLLM's memory on each rank.
        layer_names: vLLM's names of the layers, in order: those of this process's pipeline stage.
        stages: how many pipeline stages there are.
        alike: whether all tensor-parallel ranks of a stage have the same KV.
    """

    shape: ModelShape
    block_tokens: int
    blocks: int
    layer_names: tuple[str, ...]
    stages: int = 1
    alike: bool = False

    @property
    def ranks(self) -> int:
        """Number of processes that hold a part of the KV."""
        return self.shape.tp * self.stages

    @classmethod
    def of(cls, config: VllmConfig, caches: KVCacheConfig, *, name_weights: bool) -> ServedModel:
        """Return the model that vLLM's configuration and KV cache config describe.

        Args:
            config: a `VllmConfig`.
            caches: a `KVCacheConfig`.
            name_weights: whether KV may be found by another process; `with_weights` completes the
                name.

        Raises:
            ConfigError: caches, or ranks, that the connector does not serve.
        """
        parallel = config.parallel_config
        if not config.cache_config.enable_prefix_caching:
            raise ConfigError(
                "vLLM's prefix caching is off, by hand or because a kernel cannot begin amid a "
                "prompt: what kvtrie keeps could not be read"
            )
        for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
            if getattr(parallel, name, 1) > 1:
                raise ConfigError(
                    f"{name} is {getattr(parallel, name)}: kvtrie serves tensor-parallel and "
                    "pipeline ranks only"
                )
        groups = caches.kv_cache_groups
        kinds = [type(group.kv_cache_spec).__name__ for group in groups]
        if len(groups) != 1 or kinds[0] not in _SPECS:
            raise ConfigError(
                f"the model's KV is in {len(groups)} groups ({', '.join(kinds)}): kvtrie serves "
                f"one group of {' or '.join(_SPECS)}; states, windows and chunks are not supported"
            )
        spec = groups[0].kv_cache_spec
        shape = _shape(spec, len(groups[0].layer_names), parallel.tensor_parallel_size)
        hidden = getattr(config.model_config.hf_text_config, "hidden_size", None)
        if isinstance(hidden, int) and hidden > 0:
            shape = replace(shape, hidden=hidden)
        names, stages = tuple(groups[0].layer_names), parallel.pipeline_parallel_size
        if name_weights:
            whose = "vllm" if stages == 1 else f"vllm of {names}"
            shape = replace(shape, fingerprint=whose)
        alike = kinds[0] == "MLAAttentionSpec"
        return cls(shape, spec.block_size, caches.num_blocks, names, stages, alike)

    def with_weights(self, digest: bytes) -> ServedModel:
        """This model with the weights and options of all ranks in its name, if it has one."""
        if not self.shape.fingerprint:
            return self
        whose = f"{self.shape.fingerprint} weights {digest.hex()}"
        return replace(self, shape=replace(self.shape, fingerprint=whose))


def window_cost(model: ModelConfig) -> str:
    """Return a warning about memory of sliding-window layers; "" if the model has none."""
    text, longest = model.hf_text_config, model.max_model_len
    kinds = getattr(text, "layer_types", None) or ()
    spans = {
        "sliding_attention": getattr(text, "sliding_window", None),
        "chunked_attention": getattr(text, "attention_chunk_size", None),
    }
    seen = [min(spans.get(kind) or longest, longest) for kind in kinds]
    short = [span for span in seen if span < longest]
    if not short:
        return ""
    return (
        f"{len(short)} of {len(seen)} layers attend to {max(short)} tokens at most, and vLLM "
        "switches its hybrid cache manager off with a connector, so it keeps all tokens of these "
        f"layers: a request of {longest} tokens takes {len(seen) * longest / sum(seen):.1f} times "
        "the memory"
    )


def _shape(spec: FullAttentionSpec, layers: int, ranks: int) -> ModelShape:
    """A shape whose layer of a block has as many bytes as vLLM's page of one."""
    size, tokens = spec.page_size_bytes, spec.block_size
    dtype = str(spec.dtype).removeprefix("torch.")
    latent = type(spec).__name__.startswith("MLA")
    heads = 1 if latent else spec.num_kv_heads * ranks
    try:
        shape = ModelShape(layers, heads, spec.head_size, dtype, latent=latent, tp=ranks)
    except ConfigError:  # a type of numbers that kvtrie has no name for
        shape = None
    if shape is not None and shape.layer_bytes(tokens) == size:
        return shape
    # Scales and padding are in the page: its size divided by its tokens includes them.
    if size % tokens:
        raise ConfigError(f"a page of {size} bytes does not divide over its {tokens} tokens")
    return ModelShape(layers, 1, size // tokens, "uint8", latent=True, tp=ranks)
