"""ServedModel: the KV of the model that a server serves, as both halves of the connector see it.

What cannot be served rightly is refused here, at start.
Invariant: all processes of a server make the same of one configuration. Cost: with a disk, two
mebibytes are read of each file of weights, once per process.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtrie.errors import ConfigError
from kvtrie.shape import ModelShape

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig

__all__ = ["ServedModel", "weights_name", "window_cost"]

_SPECS = ("FullAttentionSpec", "MLAAttentionSpec")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_SILENT = ("_name_or_path", "architectures", "transformers_version", "use_cache")
_PIECE = 1 << 20


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
        """How many processes hold a part of the KV."""
        return self.shape.tp * self.stages

    @classmethod
    def of(cls, config: VllmConfig, caches: KVCacheConfig, *, name_weights: bool) -> ServedModel:
        """What vLLM's configuration and its plan of caches describe.

        Args:
            config: a `VllmConfig`.
            caches: a `KVCacheConfig`.
            name_weights: whether KV may be found by another process, which needs a name of the
                weights.

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
            whose = weights_name(config) if stages == 1 else f"{weights_name(config)} of {names}"
            shape = replace(shape, fingerprint=whose)
        alike = kinds[0] == "MLAAttentionSpec"
        return cls(shape, spec.block_size, caches.num_blocks, names, stages, alike)


def window_cost(model: ModelConfig) -> str:
    """What it costs that vLLM keeps all tokens of layers that attend to a window; "" for none."""
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
        f"{len(short)} of {len(seen)} layers attend to {max(short)} tokens at most, and vLLM keeps "
        f"all tokens of them beside a connector: a request of {longest} tokens takes "
        f"{len(seen) * longest / sum(seen):.1f} times the memory"
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
    # Scales or padding are in the page: a token is so many bytes, whatever they are.
    if size % tokens:
        raise ConfigError(f"a page of {size} bytes does not divide over its {tokens} tokens")
    return ModelShape(layers, 1, size // tokens, "uint8", latent=True, tp=ranks)


def weights_name(config: VllmConfig) -> str:
    """A name of the weights and of all that decides what KV they compute.

    Files of a local folder are named by their sizes and by their first and last mebibyte; a model
    of the hub by its name and revision.
    """
    model = config.model_config
    told = model.hf_config.to_dict()
    about = {
        "config": {name: one for name, one in told.items() if name not in _SILENT},
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "cache": str(config.cache_config.cache_dtype),
        "format": str(config.load_config.load_format),
        "weights": _weights(model),
    }
    if "dummy" in about["format"]:
        about["seed"] = str(model.seed)
    text = json.dumps(about, sort_keys=True, default=str)
    return f"vllm {hashlib.blake2b(text.encode(), digest_size=32).hexdigest()}"


def _weights(model: ModelConfig) -> list[Any]:
    folder = Path(model.model)
    if not folder.exists():
        return [model.model, str(model.revision)]
    files = [folder] if folder.is_file() else sorted(folder.iterdir())
    return [
        [file.name, file.stat().st_size, _ends(file)]
        for file in files
        if file.is_file() and file.suffix in _WEIGHTS
    ]


def _ends(file: Path) -> str:
    digest = hashlib.blake2b(digest_size=32)
    with file.open("rb") as opened:
        digest.update(opened.read(_PIECE))
        opened.seek(max(0, file.stat().st_size - _PIECE))
        digest.update(opened.read(_PIECE))
    return digest.hexdigest()
