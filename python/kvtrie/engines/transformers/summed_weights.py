"""sum_weights: sums the attention weights of each key during a pass.

The pass runs over copies of a layer's modules. They share its parameters, and their configuration
selects an attention function that also sums its weights. Masks and soft caps are supported, sinks
are ignored.
Invariant: the layer and its configuration are not changed, so concurrent passes are not affected.
Cost: attention in fp32, with all weights in memory: `query heads × queries × keys` numbers.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

import copy
from functools import partial
from threading import local
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface

from kvtrie.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["sum_weights"]

_NAME = "kvtrie-summed-weights"
_into = local()


def sum_weights(
    layer: torch.nn.Module,
    config: Any,  # noqa: ANN401 - a PretrainedConfig
    weights: torch.Tensor,
) -> Callable[..., Any]:
    """Return a layer's forward that also adds to `weights`, fp32 `(keys,)`.

    The weights are summed over queries and query heads.

    Args:
        layer: a decoder layer.
        config: the configuration that its attention reads.
        weights: the sums to add to.

    Raises:
        ConfigError: raised by the returned forward if the configuration does not select the
            layer's attention.
    """
    other = copy.copy(config)
    vars(other)["_attn_implementation_internal"] = _NAME
    twin = _twin(layer, config, other)

    def run(*args: Any, **given: Any) -> Any:  # noqa: ANN401 - the layer's own
        _into.weights, _into.added = weights, False
        try:
            out = twin(*args, **given)
            added = _into.added
        finally:
            del _into.weights, _into.added
        if not added:
            raise ConfigError(
                f"attention of {type(layer).__name__} is not chosen by its configuration, so its "
                "weights are not seen: choose tokens in another way than by the question"
            )
        return out

    return run


def _twin(module: torch.nn.Module, config: object, other: object) -> torch.nn.Module:
    """Copy a module tree with shared parameters and a different configuration."""
    twin = copy.copy(module)
    own = vars(twin)
    own["_modules"] = {
        name: None if child is None else _twin(child, config, other)
        for name, child in own["_modules"].items()
    }
    for name, value in own.items():
        if value is config:
            own[name] = other
        elif isinstance(value, MethodType) and value.__self__ is module:
            own[name] = MethodType(value.__func__, twin)
        elif isinstance(value, partial):  # accelerate puts the module among the arguments
            args = [twin if each is module else each for each in value.args]
            own[name] = partial(value.func, *args, **value.keywords)
    return twin


def _attend_and_sum(
    module: torch.nn.Module,  # noqa: ARG001 - as transformers calls it
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **given: Any,  # noqa: ANN401 - passed on by transformers
) -> tuple[torch.Tensor, None]:
    # Query heads grouped by KV head: (KV heads, heads each, queries, dim).
    queries = query[0].unflatten(0, (key.shape[1], -1)).float()
    scale = given.get("scaling") or query.shape[-1] ** -0.5
    scores = torch.einsum("ghqd,gkd->ghqk", queries, key[0].float()) * scale
    if (cap := given.get("softcap")) is not None:
        scores = torch.tanh(scores / cap) * cap
    if attention_mask is not None:
        scores += attention_mask[0, 0]
    weights = scores.softmax(dim=-1)
    _into.weights += weights.sum(dim=(0, 1, 2))
    _into.added = True
    out = torch.einsum("ghqk,gkd->qghd", weights, value[0].float())
    return out.flatten(1, 2)[None].to(query.dtype), None


AttentionInterface.register(_NAME, _attend_and_sum)
