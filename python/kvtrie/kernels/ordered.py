"""Ordered: attention of the last tokens of a sequence to rows in the order of their positions.

Queries are split into slices, each with the rows of its window, so no full mask is made. torch can
differentiate it.
Invariant: padding attends only to itself. Cost: with a window, queries times twice the window.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false
# (torch leaves parts untyped)

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from kvtrie.kernels.attention import _SLICE_BYTES, _spread, fits

if TYPE_CHECKING:
    from kvtrie.kernels.terms import Terms

__all__ = ["attend_ordered"]

_LEAST = 64  # smallest number of queries of a slice, also for small windows


def attend_ordered(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    span: int | None = None,
    input_pos: int = 0,
    first: torch.Tensor | None = None,
    scale: float | None = None,
    terms: Terms | None = None,
    tmp_array_limit_gb: float = 3.0,
) -> torch.Tensor:
    """Compute attention of queries to their own rows, the last rows, and to earlier rows.

    Args:
        query: `(batch, query_heads, m, dim)`, rotated.
        keys: `(batch, kv_heads, rows, dim)`, rotated, at consecutive positions.
        values: like `keys`.
        span: number of rows visible to a query, including its own. None for all earlier rows.
        input_pos: position of the first query.
        first: integers `(batch,)`, the first position after the padding of each batch row. None
            without padding.
        scale: factor of the products. None takes `dim ** -0.5`.
        terms: additions to the softmax.
        tmp_array_limit_gb: bound of temporary arrays, in 10^9 bytes.

    Returns:
        `(batch, query_heads, m, dim)`.

    Raises:
        ConfigError: the limit is below the weights of a query.
    """
    batch, heads, new, dim = query.shape
    rows = keys.shape[2]
    before, reach = rows - new, rows if span is None else min(span, rows)
    if first is not None and not bool((first > 0).any()):
        first = None
    if terms is not None:
        query = query.unflatten(1, (keys.shape[1], -1)).float()
        query = query * (dim**-0.5 if scale is None else scale)
    query_bytes = 4 * batch * heads * min(rows, 2 * reach)
    fits(query_bytes, tmp_array_limit_gb)
    limit = int(tmp_array_limit_gb * 1e9) // 2
    if terms is not None and keys.device.type == "cpu":
        limit = min(limit, _SLICE_BYTES)
    step = min(max(reach, _LEAST), max(1, limit // query_bytes))
    parts: list[torch.Tensor] = []
    for lo in range(0, new, step):
        hi = min(new, lo + step)
        start, stop = max(0, before + lo - reach + 1), before + hi
        key_at = torch.arange(start, stop, device=keys.device)
        query_at = torch.arange(before + lo, stop, device=keys.device)[:, None]
        seen = ((key_at <= query_at) & (key_at > query_at - reach))[None]
        if first is not None:
            real = key_at + (input_pos - before) >= first[:, None, None]
            seen = seen & real | (key_at == query_at)
        part, rest = keys[:, :, start:stop], values[:, :, start:stop]
        if terms is None:
            queries = query[:, :, lo:hi]
            out = functional.scaled_dot_product_attention(
                queries,
                _spread(part, queries),
                _spread(rest, queries),
                attn_mask=seen[:, None],
                scale=scale,
            )
        else:
            products = torch.matmul(query[:, :, :, lo:hi], part[:, :, None].float().mT)
            products = terms.capped(products).masked_fill(~seen[:, None, None], -torch.inf)
            out = torch.matmul(terms.softmax(products), rest[:, :, None].float())
            out = out.flatten(1, 2).to(keys.dtype)
        parts.append(out)
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
