"""Attend: attention of new tokens to rows in any order, with the total weight of each row.

Rows are masked by their tokens' positions. On a CUDA device two kernels compute it (`flash`). The
twin, their reference, splits queries into slices and computes all query heads of a KV head in a
product. The full matrix of weights is never materialised.
Invariant: weights of a query sum to 1 over its visible rows. Padding queries have no visible rows
and get zeros. Cost: two products and a softmax. Temporary arrays stay below a limit.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (torch leaves parts untyped)

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from kvtrie.errors import ConfigError
from kvtrie.kernels.flash import Flash, ready, takes
from kvtrie.kernels.padding import pays

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvtrie.kernels.terms import Terms

__all__ = ["attend", "attend_causal", "attend_masked", "attend_padded", "attend_without_weights"]

_SLICE_BYTES = 1 << 22
"""Bytes of weights of a slice on the CPU, about a core's share of its caches."""

_FEW = 16
"""Least number of queries for a search for the rows hidden from some of them."""

_SPARSE = 4
"""Rows per hidden row, from which only the hidden rows are masked."""


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    token_pos: torch.Tensor,
    input_pos: int,
    first: torch.Tensor | None = None,
    scale: float | None = None,
    terms: Terms | None = None,
    return_attn_weights: bool = False,
    tmp_array_limit_gb: float = 3.0,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute attention of queries from position `input_pos` on to rows in any order, in fp32.

    Args:
        query: `(batch, query_heads, m, dim)`, rotated.
        keys: `(batch, kv_heads, rows, dim)`, rotated.
        values: like `keys`, of any width.
        token_pos: integers `(batch, kv_heads, rows)`, each row's position. A query attends to rows
            up to its own position.
        input_pos: position of the first query.
        first: integers `(batch,)`, the first position after the padding of each batch row. None
            without padding.
        scale: factor of the products. None takes `dim ** -0.5`.
        terms: additions to the softmax. The kernels do not support them, so the twin runs.
        return_attn_weights: whether to return the weights.
        tmp_array_limit_gb: bound of the twin's temporary arrays, in 10^9 bytes.

    Returns:
        The output, `(batch, query_heads, m, width of V)` in the queries' type, and the weights
        summed over the queries, fp32 `(batch, query_heads, rows)`, or None.

    Raises:
        ConfigError: shapes do not match, or the limit is below the weights of a query.
    """
    _check(query, keys, values, token_pos)
    batch, heads, new, dim = query.shape
    groups, rows = keys.shape[1], keys.shape[2]
    each = heads // groups
    factor: float = dim**-0.5 if scale is None else scale
    if terms is None and ready(query.device) and takes(query, keys, values):
        flash = Flash(
            query,
            keys,
            values,
            token_pos=token_pos,
            input_pos=input_pos,
            first=first,
            scale=factor,
        )
        flash.attend()
        if return_attn_weights:
            flash.sum_weights()
        return flash.out, flash.weights if return_attn_weights else None
    grouped: torch.Tensor = query.unflatten(1, (groups, each)).float() * factor
    across, given = keys.float().mT, values.float()
    out = query.new_empty((batch, groups, each, new, values.shape[-1]))
    total = grouped.new_zeros((batch, groups, each, rows)) if return_attn_weights else None
    sight = _Sight.of(token_pos, input_pos, new, first)
    for lo, hi in _slices(new, 4 * batch * heads * rows, query.device, tmp_array_limit_gb):
        part = grouped[:, :, :, lo:hi].flatten(2, 3)
        weights = torch.matmul(part, across).unflatten(2, (each, hi - lo))
        weights = weights if terms is None else terms.capped(weights)
        sight.hide(weights, lo, hi)
        weights = torch.softmax(weights, dim=-1) if terms is None else terms.softmax(weights)
        if sight.blind:
            weights.nan_to_num_(0.0)  # padding has no visible rows
        if total is not None:
            total += weights.sum(dim=3)
        product = torch.matmul(weights.flatten(2, 3), given)
        out[:, :, :, lo:hi] = product.unflatten(2, (each, hi - lo))
    return out.flatten(1, 2), None if total is None else total.flatten(1, 2)


def attend_causal(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    first: torch.Tensor | None = None,
    scale: float | None = None,
    tmp_array_limit_gb: float = 3.0,
) -> torch.Tensor:
    """Compute attention of a sequence to itself by torch's fast kernel, without weights.

    Args:
        query: `(batch, query_heads, m, dim)`.
        keys: `(batch, kv_heads, m, dim)`.
        values: like `keys`.
        first: integers `(batch,)`, start of each batch row. Padding before it attends only to
            itself.
        scale: factor of the products.
        tmp_array_limit_gb: bound of masks with padding, in 10^9 bytes.

    Returns:
        `(batch, query_heads, m, dim)`.

    Raises:
        ConfigError: the limit is below the mask of a query.
    """
    keys, values = _spread(keys, query), _spread(values, query)
    if first is None or not bool((first > 0).any()):
        return functional.scaled_dot_product_attention(
            query, keys, values, is_causal=True, scale=scale
        )
    new = query.shape[2]
    places = torch.arange(new, device=query.device)
    parts: list[torch.Tensor] = []
    for lo, hi in _mask_slices(query, new, tmp_array_limit_gb):
        query_at = places[lo:hi, None]
        seen = (places <= query_at) & (places >= first[:, None, None]) | (places == query_at)
        parts.append(
            functional.scaled_dot_product_attention(
                query[:, :, lo:hi], keys, values, attn_mask=seen[:, None], scale=scale
            )
        )
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def attend_masked(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    token_pos: torch.Tensor,
    input_pos: int,
    first: torch.Tensor | None = None,
    scale: float | None = None,
    tmp_array_limit_gb: float = 3.0,
) -> torch.Tensor:
    """Compute `attend` without weights, by torch's kernel with a mask. Padding gets zeros.

    Queries are split into slices with masks below the limit. On CPUs this was faster than
    `attend_padded`, see `attend_without_weights`.
    """
    _check(query, keys, values, token_pos)
    each = query.shape[1] // keys.shape[1]
    sight = _Sight.of(token_pos, input_pos, query.shape[2], first)
    spread, given = _spread(keys, query), _spread(values, query)
    parts: list[torch.Tensor] = []
    for lo, hi in _mask_slices(query, keys.shape[2], tmp_array_limit_gb):
        mask = (~sight.hidden(lo, hi)[:, :, 0]).repeat_interleave(each, dim=1)
        part = functional.scaled_dot_product_attention(
            query[:, :, lo:hi], spread, given, attn_mask=mask, scale=scale
        )
        parts.append(part.nan_to_num(0.0) if sight.blind else part)
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def attend_padded(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    token_pos: torch.Tensor,
    scale: float | None = None,
) -> torch.Tensor:
    """Compute `attend` without weights or padding, by torch's causal kernel over a square.

    Keys and values are sorted by position, so that the new rows are last, and queries are padded
    with zeros on the left. The rows must include the queries' own tokens as the newest rows, as in
    a cache right after their write.
    """
    _check(query, keys, values, token_pos)
    order = token_pos.argsort(dim=-1)[..., None]
    keys = keys.gather(2, order.expand(-1, -1, -1, keys.shape[-1]))
    values = values.gather(2, order.expand(-1, -1, -1, values.shape[-1]))
    new, rows = query.shape[2], keys.shape[2]
    square = functional.pad(query, (0, 0, rows - new, 0))
    out = functional.scaled_dot_product_attention(
        square, _spread(keys, query), _spread(values, query), is_causal=True, scale=scale
    )
    return out[:, :, rows - new :]


def attend_without_weights(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    token_pos: torch.Tensor,
    input_pos: int,
    first: torch.Tensor | None = None,
    scale: float | None = None,
    terms: Terms | None = None,
    tmp_array_limit_gb: float = 3.0,
) -> torch.Tensor:
    """Compute `attend` without weights, right after the write of the queries' own tokens.

    Calls `attend_padded` if it was measured to be faster on this kind of device (`padding.json`),
    nothing is padded and its arrays stay below the limit. Otherwise calls `attend_masked`, and with
    terms `attend`.
    """
    if terms is not None:
        out, _ = attend(
            query,
            keys,
            values,
            token_pos=token_pos,
            input_pos=input_pos,
            first=first,
            scale=scale,
            terms=terms,
            tmp_array_limit_gb=tmp_array_limit_gb,
        )
        return out
    # Padded queries and their output, and K and V in order.
    square = 4 * query.shape[0] * query.shape[1] * keys.shape[2] * query.shape[3]
    small = square * query.element_size() <= tmp_array_limit_gb * 1e9
    if first is None and small and pays(query.device.type, query.shape[2], keys.shape[2]):
        return attend_padded(query, keys, values, token_pos=token_pos, scale=scale)
    return attend_masked(
        query,
        keys,
        values,
        token_pos=token_pos,
        input_pos=input_pos,
        first=first,
        scale=scale,
        tmp_array_limit_gb=tmp_array_limit_gb,
    )


class _Sight:
    """Visibility of rows to queries."""

    def __init__(
        self, token_pos: torch.Tensor, queries: torch.Tensor, first: torch.Tensor | None
    ) -> None:
        self._token_pos = token_pos
        self._queries = queries
        self._first = first
        self.blind = first is not None

    @classmethod
    def of(
        cls, token_pos: torch.Tensor, input_pos: int, new: int, first: torch.Tensor | None
    ) -> _Sight:
        if first is not None and not bool((first > 0).any()):
            first = None
        small = token_pos.to(torch.int32)
        queries = torch.arange(input_pos, input_pos + new, device=small.device, dtype=torch.int32)
        return cls(small, queries, first)

    @cached_property
    def _late(self) -> torch.Tensor | None:
        """Return the rows hidden from a query on the CPU, or None if a mask of all is faster."""
        if self._first is not None or self._token_pos.device.type != "cpu":
            return None
        if len(self._queries) < _FEW:  # a search would take longer
            return None
        late = (self._token_pos > self._queries[0]).flatten(0, 1).any(dim=0)
        late = late.nonzero()[:, 0]
        return late if _SPARSE * len(late) <= self._token_pos.shape[2] else None

    def hide(self, products: torch.Tensor, lo: int, hi: int) -> None:
        """Hide rows in the products of queries `(batch, kv_heads, each, hi - lo, rows)`."""
        late = self._late
        if late is None:
            products.masked_fill_(self.hidden(lo, hi), -torch.inf)
        elif len(late):
            rows = self._token_pos[:, :, None, None, late]
            some = products.index_select(-1, late)
            some.masked_fill_(rows > self._queries[lo:hi, None], -torch.inf)
            products.index_copy_(-1, late, some)

    def hidden(self, lo: int, hi: int) -> torch.Tensor:
        """Return True for hidden rows, bool `(batch, kv_heads, 1, hi - lo, rows)`."""
        rows = self._token_pos[:, :, None, None, :]
        hidden = rows > self._queries[lo:hi, None]
        if self._first is not None:
            hidden |= rows < self._first[:, None, None, None, None]
        return hidden


def fits(query_bytes: int, limit_gb: float) -> None:
    """Refuse a limit of temporary arrays below twice the weights of a query.

    Raises:
        ConfigError: the limit is below.
    """
    if 2 * query_bytes > limit_gb * 1e9:
        raise ConfigError(
            f"the weights of one query take {2 * query_bytes / 1e9:.3g} GB of temporary arrays, "
            f"the limit is {limit_gb:g} GB"
        )


def _slices(
    new: int, query_bytes: int, device: torch.device, limit_gb: float
) -> Iterator[tuple[int, int]]:
    """Yield ranges of queries with weights below half of the limit."""
    limit = int(limit_gb * 1e9) // 2
    fits(query_bytes, limit_gb)
    if device.type == "cpu":
        limit = min(limit, max(_SLICE_BYTES, query_bytes))
    step = max(1, limit // query_bytes)
    for lo in range(0, new, step):
        yield lo, min(new, lo + step)


def _mask_slices(query: torch.Tensor, rows: int, limit_gb: float) -> Iterator[tuple[int, int]]:
    """Yield ranges of queries with masks, converted to fp32 by torch's kernel, below the limit.

    The smaller CPU bound of `_slices` is not needed: the kernel makes no array of weights.
    """
    query_bytes = 4 * query.shape[0] * query.shape[1] * rows
    fits(query_bytes, limit_gb)
    step = max(1, int(limit_gb * 1e9) // (2 * query_bytes))
    for lo in range(0, query.shape[2], step):
        yield lo, min(query.shape[2], lo + step)


def _spread(rows: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Repeat each KV head for its query heads."""
    each = query.shape[1] // rows.shape[1]
    return rows if each == 1 else rows.repeat_interleave(each, dim=1)


def _check(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, token_pos: torch.Tensor
) -> None:
    groups = keys.shape[1] if keys.dim() == query.dim() == 4 else 0  # noqa: PLR2004 - four axes
    if (
        not groups
        or query.shape[1] % groups
        or query.shape[0] != keys.shape[0]
        or query.shape[3] != keys.shape[3]
        or keys.shape[:3] != values.shape[:3]
        or token_pos.shape != keys.shape[:3]
    ):
        raise ConfigError(
            f"queries {tuple(query.shape)}, keys {tuple(keys.shape)}, values "
            f"{tuple(values.shape)} and positions {tuple(token_pos.shape)} do not go together"
        )
