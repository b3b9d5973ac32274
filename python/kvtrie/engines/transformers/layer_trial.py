"""Layer trial: test passes that show the cache contents of each layer of a model.

Configurations are incomplete: layers of a model may differ in heads and widths, share KV or keep
recurrent states. A model is tried once, with transformers' own cache.
Invariant: the result describes the objects in this cache. A layer with anything except K, V,
convolution and recurrent states is refused. A model is also refused if its output depends on the
split of its tokens into passes. Cost: up to three runs over eleven tokens per model object.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any, Literal, cast
from weakref import ref

import torch
import transformers
from transformers import cache_utils
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from kvtrie.engines.identity.model_state import ModelCache, ModelState
from kvtrie.engines.transformers.guard import Guard
from kvtrie.engines.transformers.trial import run_pass
from kvtrie.errors import ConfigError
from kvtrie.model.layer_group import LayerGroup
from kvtrie.model.shape import ModelShape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

__all__ = ["LayerCache", "LayerState", "Tried", "model_shape", "no_cache", "shape_of", "try_layers"]

_TOKENS = 11
_SPLIT = 6
_KINDS: dict[type, tuple[Literal["full", "sliding"] | None, bool]] = {
    DynamicLayer: ("full", False),
    DynamicSlidingWindowLayer: ("sliding", False),
    LinearAttentionLayer: (None, True),
    LinearAttentionAndFullAttentionLayer: ("full", True),
    LinearAttentionAndSlidingWindowAttentionLayer: ("sliding", True),
}
NO_CACHE: type | None = getattr(cache_utils, "DummyLayer", None)
"""transformers' cache layer for a model layer without a cache, None in older versions."""
if NO_CACHE is not None:
    _KINDS[NO_CACHE] = (None, False)
# Share of the largest logit. Rounding by the order of summation stays below, a lost state above.
_APART = 1e-3


def no_cache() -> type:
    """Return transformers' cache layer for a model layer without a cache.

    Raises:
        ConfigError: this version of transformers has none. Separate layer groups need it.
    """
    if NO_CACHE is None:
        raise ConfigError(
            f"transformers {transformers.__version__} has no DummyLayer, which groups of layers "
            "that are kept apart need: install 5.23 or later"
        )
    return NO_CACHE


@dataclass(frozen=True, slots=True)
class LayerState:
    """State tensor of a layer, for a single sequence.

    Attributes:
        kind: a convolution's last inputs, or a recurrent state.
        index: its number in the layer.
        shape: its shape without the axis of sequences.
        dtype: its type.
    """

    kind: Literal["conv", "recurrent"]
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Bytes per sequence."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Cache contents of a layer, for a single sequence.

    Attributes:
        kind: kind of attention, None without KV.
        window: tokens of a sliding window, else 0.
        heads: heads of K and V.
        head_dim: numbers per head of K.
        v_head_dim: numbers per head of V.
        dtype: torch's name of the type of K and V.
        states: its states, in the order of their bytes.
    """

    kind: Literal["full", "sliding"] | None
    window: int
    heads: int
    head_dim: int
    v_head_dim: int
    dtype: str
    states: tuple[LayerState, ...]

    @property
    def state_bytes(self) -> int:
        """Bytes of all states per sequence."""
        return sum(state.bytes for state in self.states)

    def empty(self) -> Any:  # noqa: ANN401 - of transformers
        """Return an empty transformers cache layer with these contents."""
        kind = next(one for one, kept in _KINDS.items() if kept == (self.kind, bool(self.states)))
        count = 1 + max((state.index for state in self.states), default=0)
        return kind(sliding_window=self.window, number_of_states=count)


@dataclass(frozen=True, slots=True)
class Tried:
    """Result of a trial.

    Attributes:
        layers: cache contents of each layer.
        entry: the innermost module called with the tokens and the cache.
        stepwise: whether a pass over a cached state is limited to one token.
    """

    layers: tuple[LayerCache, ...]
    entry: ref[torch.nn.Module]
    stepwise: bool

    def entered(self) -> torch.nn.Module:
        """Return the module of `entry`.

        Raises:
            ConfigError: the model no longer has it.
        """
        entry = self.entry()
        if entry is None:
            raise ConfigError("the model has changed since it was tried")
        return entry


_tried: ModelCache[Tried] = ModelCache()


def try_layers(model: PreTrainedModel, state: ModelState | None = None) -> Tried:
    """Try a model, or return the earlier result if the model has not changed.

    Args:
        model: the model, in evaluation mode.
        state: its state, if known to the caller.

    Raises:
        ConfigError: the model does not run on transformers' own cache, a layer keeps more than K, V
            and states or keeps them outside the cache, or passes cannot continue a cached state.
    """
    known = _tried.get(model, state)
    if known is not None and known.entry() is not None:
        return known
    Guard(model).ready()
    config: Any = cast("Any", model.config).get_text_config(decoder=True)
    name = type(model.base_model).__name__
    ids = torch.arange(_TOKENS, device=model.device)[None] % config.vocab_size
    whole, cache, entered = _pass_over(model, config, ids, (_TOKENS,))
    if not entered:
        raise ConfigError(
            f"no module of {type(model).__name__} takes both input_ids and past_key_values by "
            "these names, so its tokens are not seen"
        )
    layers = tuple(_layer_cache(name, at, layer) for at, layer in enumerate(cache.layers))
    stepwise = False
    if not _agree(whole, _pass_over(model, config, ids, (_SPLIT, _TOKENS))[0], model.dtype):
        steps = tuple(range(_SPLIT, _TOKENS + 1))
        logits, other, _ = _pass_over(model, config, ids, steps)
        stepwise = any(layer.states for layer in layers)
        if not stepwise or not _agree(whole, logits, model.dtype):
            raise ConfigError(
                f"{name} computes other logits when a pass continues a cached one; the first "
                f"layer whose cache differs is {_first_apart(cache, other, model.dtype)}"
            )
    found = Tried(layers, ref(entered[-1]), stepwise)
    _tried.put(model, found)
    return found


def model_shape(model: PreTrainedModel, *, fingerprint: str = "") -> ModelShape:
    """Return the shape of a model's KV and states, by running it over a few tokens.

    Layers with equal cache contents form a group. Groups with full attention are first.

    Args:
        model: the model, in evaluation mode.
        fingerprint: names the weights: `kvtrie.engines.transformers.fingerprint(model)`.

    Raises:
        ConfigError: `KvtrieCache` would refuse the model, or no layer keeps KV.
    """
    return shape_of(model, try_layers(model), fingerprint=fingerprint)


def shape_of(model: PreTrainedModel, tried: Tried, *, fingerprint: str) -> ModelShape:
    """Return the shape of a tried model, as `model_shape`."""
    config: Any = cast("Any", model.config).get_text_config(decoder=True)
    kept: dict[tuple[Any, ...], list[int]] = {}
    for at, layer in enumerate(tried.layers):
        if layer.kind is not None:
            form = (layer.heads, layer.head_dim, layer.v_head_dim, layer.dtype)
            kept.setdefault((layer.kind, layer.window, *form), []).append(at)
    states: dict[int, list[int]] = {}
    for at, layer in enumerate(tried.layers):
        if layer.states:
            states.setdefault(layer.state_bytes, []).append(at)
    if not kept:
        raise ConfigError(
            f"no layer of {type(model.base_model).__name__} keeps KV: kvtrie finds prefixes by the "
            "blocks of a layer with attention"
        )
    ordered = sorted(kept.items(), key=lambda row: (row[0][0] != "full", -len(row[1])))
    heads, key, value, dtype = ordered[0][0][2:]
    groups = [
        LayerGroup(
            tuple(own),
            kind=kind,
            window=window,
            kv_heads=_other(form[0], heads),
            head_dim=_other(form[1], key),
            v_head_dim=None if form[1] == form[2] and key == value else _other(form[2], value),
            dtype=_other(form[3], dtype),
        )
        for (kind, window, *form), own in ordered
    ]
    groups += [
        LayerGroup(tuple(own), kind="state", state_bytes=len(own) * size)
        for size, own in states.items()
    ]
    every = groups == [LayerGroup(tuple(range(len(tried.layers))))]
    return ModelShape(
        layers=len(tried.layers),
        kv_heads=heads,
        head_dim=key,
        v_head_dim=value if value != key else None,
        dtype=dtype,
        query_heads=getattr(config, "num_attention_heads", None),
        hidden=getattr(config, "hidden_size", None),
        groups=() if every else tuple(groups),
        fingerprint=fingerprint,
    )


def _other(value: Any, usual: Any) -> Any:  # noqa: ANN401 - a field's type
    return None if value == usual else value


def _pass_over(
    model: PreTrainedModel,
    config: Any,  # noqa: ANN401 - a PretrainedConfig
    ids: torch.Tensor,
    ends: Sequence[int],
) -> tuple[torch.Tensor, DynamicCache, list[torch.nn.Module]]:
    """Run passes that end at `ends`. Return all logits, the cache and the entered modules."""
    cache = DynamicCache(config=config)
    found: list[torch.Tensor] = []
    entered: list[torch.nn.Module] = []
    for start, end in pairwise((0, *ends)):
        output, modules = run_pass(model, cache, ids[:, start:end], start)
        found.append(output[0].float())
        entered = entered or modules
    return torch.cat(found, dim=1), cache, entered


def _layer_cache(name: str, at: int, layer: Any) -> LayerCache:  # noqa: ANN401 - of transformers
    if type(layer) not in _KINDS:
        raise ConfigError(
            f"layer {at} of {name} keeps a {type(layer).__name__}, which holds more than K, V, "
            "convolution and recurrent states"
        )
    kind, recurrent = _KINDS[type(layer)]
    states = tuple(_states(layer)) if recurrent else ()
    if kind is None:
        if recurrent and not states:
            no_cache()  # in versions without it, a layer without a cache looks the same
            raise ConfigError(f"layer {at} of {name} keeps its state outside of the cache")
        return LayerCache(None, 0, 0, 0, 0, "", states)
    if layer.keys is None or not layer.keys.numel():
        raise ConfigError(f"layer {at} of {name} hands no K and V to its cache")
    tokens = (layer.keys.shape[0], layer.values.shape[0], layer.get_seq_length())
    if tokens != (1, 1, _TOKENS) or layer.keys.shape[2] != layer.values.shape[2]:
        raise ConfigError(
            f"layer {at} of {name} caches {tokens[2]} tokens of {tokens[0]} rows where {_TOKENS} "
            "of 1 were given"
        )
    return LayerCache(
        kind,
        layer.sliding_window if kind == "sliding" else 0,
        layer.keys.shape[1],
        layer.keys.shape[3],
        layer.values.shape[3],
        str(layer.keys.dtype).removeprefix("torch."),
        states,
    )


def _states(layer: LinearAttentionLayer) -> list[LayerState]:
    kinds: tuple[tuple[Literal["conv", "recurrent"], dict[int, torch.Tensor | None]], ...] = (
        ("conv", layer.conv_states),
        ("recurrent", layer.recurrent_states),
    )
    return [
        LayerState(kind, index, tuple(tensor.shape[1:]), tensor.dtype)
        for kind, tensors in kinds
        for index, tensor in tensors.items()
        if tensor is not None
    ]


def _agree(one: torch.Tensor, other: torch.Tensor, dtype: torch.dtype) -> bool:
    allowed = max(_APART, 16 * torch.finfo(dtype).eps) * float(one.abs().max())
    return bool((one - other).abs().max() <= allowed)


def _first_apart(one: DynamicCache, other: DynamicCache, dtype: torch.dtype) -> int:
    """Return the first layer with K, V or states that differ by more than rounding."""
    for at, (mine, theirs) in enumerate(zip(one.layers, other.layers, strict=True)):
        pairs = zip(_tensors(mine), _tensors(theirs), strict=True)
        if not all(_agree(first.float(), second.float(), dtype) for first, second in pairs):
            return at
    return len(one.layers) - 1


def _tensors(layer: Any) -> list[torch.Tensor]:  # noqa: ANN401 - of transformers
    kept = [getattr(layer, "keys", None), getattr(layer, "values", None)]
    for name in ("conv_states", "recurrent_states"):
        kept += getattr(layer, name, {}).values()
    return [tensor for tensor in kept if tensor is not None and tensor.numel()]
