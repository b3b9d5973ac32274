"""Weighing: how much attention each key is given in a pass, in addition to attention's output.

While it is on, layers run an implementation of attention that also adds up its weights. It knows
masks and soft caps; sinks are left out.
Invariant: the configuration is put back as it was. Cost: attention in fp32, all of its weights at
once: `query heads × queries × keys` numbers.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

from contextlib import contextmanager
from threading import local
from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface

if TYPE_CHECKING:
    from collections.abc import Generator

__all__ = ["weighing"]

_NAME = "kvtrie-weighed"
_into = local()


@contextmanager
def weighing(config: Any, weights: torch.Tensor) -> Generator[None]:  # noqa: ANN401 - a PretrainedConfig
    """Add to `weights`, fp32 `(keys,)`, the weights summed over queries and query heads."""
    before = config._attn_implementation  # noqa: SLF001 - has no public name
    _into.weights = weights
    config._attn_implementation = _NAME  # noqa: SLF001
    try:
        yield
    finally:
        config._attn_implementation = before  # noqa: SLF001
        del _into.weights


def _weighed(
    module: torch.nn.Module,  # noqa: ARG001 - as transformers calls it
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **given: Any,  # noqa: ANN401 - what transformers passes on
) -> tuple[torch.Tensor, None]:
    # Query heads of one KV head side by side: (KV heads, heads each, queries, dim).
    queries = query[0].unflatten(0, (key.shape[1], -1)).float()
    scale = given.get("scaling") or query.shape[-1] ** -0.5
    scores = torch.einsum("ghqd,gkd->ghqk", queries, key[0].float()) * scale
    if (cap := given.get("softcap")) is not None:
        scores = torch.tanh(scores / cap) * cap
    if attention_mask is not None:
        scores += attention_mask[0, 0]
    weights = scores.softmax(dim=-1)
    _into.weights += weights.sum(dim=(0, 1, 2))
    out = torch.einsum("ghqk,gkd->qghd", weights, value[0].float())
    return out.flatten(1, 2)[None].to(query.dtype), None


AttentionInterface.register(_NAME, _weighed)
