"""Mask: attention masks for queries with explicit positions.

Invariant: a query sees keys up to its own position, within the window of its kind of layer.
Cost: `queries × keys` numbers per kind of layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from kvtrie.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["masks"]

_MASKED = ("sdpa", "eager")


def masks(
    model: PreTrainedModel, queries: torch.Tensor, keys: int
) -> torch.Tensor | dict[str, torch.Tensor]:
    """Return an additive mask `(1, 1, queries, keys)`, or one per kind of layer if kinds mix.

    Args:
        model: the model with the attention settings.
        queries: int64 `(queries,)`, their positions.
        keys: number of keys, at positions from 0 on.

    Raises:
        ConfigError: a kind of layer has no known mask, or the attention implementation takes no
            mask.
    """
    config: Any = cast("Any", model.config).get_text_config(decoder=True)
    if config._attn_implementation not in _MASKED:  # noqa: SLF001 - has no public name
        raise ConfigError(
            f"tokens at separate positions need attention that takes any mask, "
            f"{' or '.join(_MASKED)}, not {config._attn_implementation!r}"  # noqa: SLF001
        )
    window = getattr(config, "sliding_window", None)
    chunk = getattr(config, "attention_chunk_size", None)
    kinds: list[str] | None = getattr(config, "layer_types", None)
    places = torch.arange(keys, device=queries.device)
    distance = queries[:, None] - places

    def additive(seen: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(seen.shape, dtype=model.dtype, device=seen.device)
        return mask.masked_fill_(~seen, torch.finfo(model.dtype).min)[None, None]

    full = distance >= 0
    sliding = full & (distance < window) if window else full
    if kinds is None:
        return additive(sliding)
    by_kind = {"full_attention": full, "sliding_attention": sliding}
    if chunk:
        by_kind["chunked_attention"] = full & (queries[:, None] // chunk == places // chunk)
    if unknown := set(kinds) - set(by_kind):
        raise ConfigError(f"no mask is known for layers of {', '.join(sorted(unknown))}")
    return {kind: additive(by_kind[kind]) for kind in set(kinds)}
