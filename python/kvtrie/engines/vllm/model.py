"""ServedModel: the KV of a server's model, for both halves of the connector.

Unsupported configurations are refused here, at start.
Invariant: all processes of a server derive the same model from its configuration.
Cost: none per step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from kvtrie import ResumePoints
from kvtrie.errors import ConfigError
from kvtrie.model.group_pages import GroupPages
from kvtrie.model.layer_group import LayerGroup
from kvtrie.model.shape import ModelShape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.config import ParallelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvtrie.engines.vllm.settings import Settings
    from kvtrie.settings.tier import Tier

__all__ = ["ServedGroup", "ServedModel"]

_KINDS: dict[str, Literal["full", "sliding", "chunked", "state"]] = {
    "FullAttentionSpec": "full",
    "MLAAttentionSpec": "full",
    "SlidingWindowSpec": "sliding",
    "SlidingWindowMLASpec": "sliding",
    "ChunkedLocalAttentionSpec": "chunked",
    "MambaSpec": "state",
}
"""The kinds of layer groups by vLLM's specs."""


@dataclass(frozen=True, slots=True)
class ServedGroup:
    """A group of layers with its own block tables in vLLM.

    Attributes:
        number: vLLM's number of the group.
        names: vLLM's names of its layers.
        state: whether the layers keep states instead of KV.
        pages: vLLM's blocks of the group per block of the manager.
    """

    number: int
    names: tuple[str, ...]
    state: bool = False
    pages: int = 1


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The shape of a server's KV and its distribution over ranks.

    Attributes:
        shape: of the layers of this process's pipeline stage, with its tensor-parallel ranks.
        block_tokens: tokens per block, the least common multiple over vLLM's groups.
        blocks: blocks of vLLM's memory on each rank.
        groups: the layers by group, groups with full attention first.
        hashes: the number of vLLM's hashes per block.
        stages: the number of pipeline stages.
        replicated: whether all tensor-parallel ranks of a stage have the same KV.
    """

    shape: ModelShape
    block_tokens: int
    blocks: int
    groups: tuple[ServedGroup, ...]
    stages: int = 1
    replicated: bool = False
    hashes: int = 1

    @property
    def ranks(self) -> int:
        """Number of processes with a part of the KV."""
        return self.shape.tp * self.stages

    @property
    def layer_names(self) -> tuple[str, ...]:
        """vLLM's names of the layers, in the order of the shape."""
        return tuple(name for group in self.groups for name in group.names)

    @property
    def first_layers(self) -> int:
        """Number of layers of the first group."""
        return len(self.groups[0].names)

    def room(self, tier: Tier) -> int:
        """Return the capacity of a tier below vLLM's memory: blocks, or with several groups bytes.

        Raises:
            ConfigError: a budget below a block.
        """
        if self.resume is None or tier.kind == "remote":
            return tier.room(self.shape, self.block_tokens)
        return GroupPages.of(self.shape, tier, self.block_tokens).bytes

    def budget(self, tier: Tier, room: int) -> Tier:
        """Return a tier with a capacity as returned by `room`."""
        if self.resume is None or tier.kind == "remote":
            return replace(tier, blocks=room, bytes=None)
        return replace(tier, blocks=None, bytes=room)

    @property
    def resume(self) -> ResumePoints | None:
        """The resume points of a model with several groups."""
        return ResumePoints() if len(self.groups) > 1 else None

    @classmethod
    def of(cls, config: VllmConfig, caches: KVCacheConfig, *, name_weights: bool) -> ServedModel:
        """Return the model of vLLM's configuration and KV cache config.

        Args:
            config: a `VllmConfig`.
            caches: a `KVCacheConfig`.
            name_weights: whether KV may be found by a later process. `with_weights` completes the
                name.

        Raises:
            ConfigError: unsupported caches or ranks.
        """
        parallel = config.parallel_config
        if not config.cache_config.enable_prefix_caching:
            raise ConfigError(
                "vLLM's prefix caching is off, and without it vLLM reads no stored blocks: start "
                "with --enable-prefix-caching, and with kernels that can resume inside a prompt"
            )
        for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
            if getattr(parallel, name, 1) > 1:
                raise ConfigError(
                    f"{name} is {getattr(parallel, name)}: kvtrie serves tensor-parallel and "
                    "pipeline ranks only"
                )
        served = _served_groups(caches)
        # vLLM returns hits in multiples of the blocks of all groups, draft layers included.
        size = math.lcm(*(group.kv_cache_spec.block_size for group in caches.kv_cache_groups))
        groups = tuple(replace(group, pages=size // spec.block_size) for group, spec in served)
        shape = _shape([(len(group.names), spec) for group, spec in served], parallel)
        hidden = getattr(config.model_config.hf_text_config, "hidden_size", None)
        if isinstance(hidden, int) and hidden > 0:
            shape = replace(shape, hidden=hidden)
        stages = parallel.pipeline_parallel_size
        if name_weights:
            whose = "vllm" if stages == 1 else f"vllm of {served[0][0].names}"
            shape = replace(shape, fingerprint=whose)
        replicated = len(groups) == 1 and type(served[0][1]).__name__ == "MLAAttentionSpec"
        hashes = _hashes(config, caches, size)
        return cls(shape, size, caches.num_blocks, groups, stages, replicated, hashes)

    def require_served(self, settings: Settings) -> None:
        """Raise unless a model with several groups is supported with these settings.

        Raises:
            ConfigError: a setting supported only with a single group, or too little vLLM memory for
                a block and a resume point.
        """
        if self.resume is None:
            return
        wanted = sum(group.pages for group in self.groups) + 1
        if self.blocks < wanted:
            raise ConfigError(
                f"vLLM's memory has {self.blocks} blocks, one of which is never used: a block and "
                f"a resume point of {len(self.groups)} groups of layers want {wanted}"
            )
        if settings.native_first:
            raise ConfigError(
                f"native_first is {settings.native_first}: supported with one group of layers, the "
                f"model has {len(self.groups)}"
            )

    def with_weights(self, digest: bytes) -> ServedModel:
        """Return this model with the weights and options of all ranks added to its name, if any."""
        if not self.shape.fingerprint:
            return self
        whose = f"{self.shape.fingerprint} weights {digest.hex()}"
        return replace(self, shape=replace(self.shape, fingerprint=whose))


def _hashes(config: VllmConfig, caches: KVCacheConfig, size: int) -> int:
    """Return the number of vLLM's hashes of a block, resolved as in vLLM."""
    if len(caches.kv_cache_groups) == 1:
        return 1
    specs = [group.kv_cache_spec for group in caches.kv_cache_groups]
    cached = [spec.block_size for spec in specs if getattr(spec, "prefix_cacheable", True)]
    return size // (getattr(config.cache_config, "prefix_match_unit", None) or math.gcd(*cached))


def _served_groups(caches: KVCacheConfig) -> list[tuple[ServedGroup, Any]]:
    """Return vLLM's groups with their specs, groups with full attention first.

    Raises:
        ConfigError: an unsupported spec, or no group with full attention.
    """
    served: list[tuple[ServedGroup, Any]] = []
    for number, group in enumerate(caches.kv_cache_groups):
        name, spec = type(group.kv_cache_spec).__name__, group.kv_cache_spec
        # KV of draft layers is recomputed, and so are groups outside vLLM's own prefix cache.
        if getattr(group, "is_eagle_group", False) or not getattr(spec, "prefix_cacheable", True):
            continue
        if name not in _KINDS:
            raise ConfigError(
                f"group {number} of the model's layers has vLLM's {name}: kvtrie serves "
                f"{', '.join(_KINDS)}"
            )
        if (mode := getattr(spec, "mamba_cache_mode", "align")) != "align":
            raise ConfigError(
                f"group {number} keeps states in vLLM's mode {mode!r}: kvtrie serves 'align', "
                "--mamba-cache-mode align"
            )
        names, state = tuple(group.layer_names), _KINDS[name] == "state"
        served.append((ServedGroup(number, names, state=state), spec))
    served.sort(key=lambda one: _KINDS[type(one[1]).__name__] != "full")
    kinds = [type(spec).__name__ for _, spec in served]
    if not kinds or _KINDS[kinds[0]] != "full":
        raise ConfigError(
            f"the model's KV is in {len(kinds)} groups ({', '.join(kinds)}): kvtrie serves models "
            "with at least one group of layers that attend to all tokens"
        )
    return served


def _shape(groups: Sequence[tuple[int, Any]], parallel: ParallelConfig) -> ModelShape:
    """Return the shape of groups, given with their numbers of layers.

    A layer of a block has the bytes of vLLM's pages of the block.
    """
    ranks, layers = parallel.tensor_parallel_size, sum(count for count, _ in groups)
    form = _form(groups[0][1], ranks)
    shape = ModelShape(
        layers, form.kv_heads, form.head_dim, form.dtype, latent=form.latent, tp=ranks
    )
    if len(groups) == 1:
        return shape
    named, begin = list[LayerGroup](), 0
    for count, spec in groups:
        named.append(_layer_group(spec, tuple(range(begin, begin + count)), ranks))
        begin += count
    return replace(shape, groups=tuple(named))


def _layer_group(spec: Any, layers: tuple[int, ...], ranks: int) -> LayerGroup:  # noqa: ANN401 - any of vLLM's specs
    """Return the group of layers of a spec."""
    kind = _KINDS[type(spec).__name__]
    if kind == "state":
        sizes = zip(spec.shapes, spec.dtypes, strict=True)
        state = sum(math.prod(shape) * dtype.itemsize for shape, dtype in sizes)
        return LayerGroup(layers, kind, state_bytes=len(layers) * state)
    spans = {"sliding": "sliding_window", "chunked": "attention_chunk_size"}
    window = getattr(spec, spans[kind]) if kind in spans else 0
    window += getattr(spec, "extra_retained_tokens", 0)  # kept by vLLM for later draft tokens
    form = _form(spec, ranks)._asdict()
    return LayerGroup(layers, kind, window, **form, tokens_per_row=_tokens_per_row(spec))


def _tokens_per_row(spec: Any) -> int:  # noqa: ANN401 - any of vLLM's specs with KV
    """Return the tokens per row of KV, 1 if a token has several rows."""
    tokens = getattr(spec, "tokens_per_state", 1)
    return tokens if isinstance(tokens, int) else 1


class _Form(NamedTuple):
    """The fields of a shape, or of a group of layers, for the KV of a layer."""

    kv_heads: int
    head_dim: int
    dtype: str
    latent: bool


def _form(spec: Any, ranks: int) -> _Form:  # noqa: ANN401 - any of vLLM's specs with KV
    """Return the form of the KV of a layer with a spec.

    Raises:
        ConfigError: the bytes of a page are no multiple of its tokens.
    """
    # If groups share memory, tensors of a group with smaller pages have gaps between blocks.
    padded = getattr(spec, "page_size_padded", None) is not None
    size = spec.real_page_size_bytes if padded else spec.page_size_bytes
    tokens = spec.block_size // _tokens_per_row(spec)
    dtype = str(spec.dtype).removeprefix("torch.")
    latent = "MLA" in type(spec).__name__
    heads = 1 if latent else spec.num_kv_heads * ranks
    form = _Form(heads, spec.head_size, dtype, latent)
    try:
        shape = ModelShape(1, heads, spec.head_size, dtype, latent=latent, tp=ranks)
    except ConfigError:  # a dtype unknown to kvtrie
        shape = None
    if shape is not None and shape.layer_bytes(tokens) == size:
        return form
    # Treat the page as opaque bytes per token: they include scales and padding.
    if size % tokens:
        raise ConfigError(f"a page of {size} bytes does not divide over its {tokens} rows")
    return _Form(1, size // tokens, "uint8", latent=True)
