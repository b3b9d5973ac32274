"""Attend backward: gradients of `attend`, from its arguments and the gradient of its output.

Weights are computed again, so nothing of the forward pass is kept. On a CUDA device this is a
kernel (`flash_backward`). The twin, its reference, computes slices of queries.
Invariant: the rows' gradients are added to the given tensors. Cost: five products and a softmax.
Temporary arrays stay below a limit.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false
# (torch leaves parts untyped)

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvtrie.errors import ConfigError
from kvtrie.kernels.attention import (
    _check,
    _Sight,
    _slices,
)
from kvtrie.kernels.flash import Flash, ready
from kvtrie.kernels.flash_backward import FlashBackward, takes_back

if TYPE_CHECKING:
    from kvtrie.kernels.terms import Terms

__all__ = ["attend_backward"]


def attend_backward(  # noqa: PLR0917 - a gradient follows each of three tensors
    grad: torch.Tensor,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    key_grads: torch.Tensor,
    value_grads: torch.Tensor,
    *,
    token_pos: torch.Tensor,
    input_pos: int,
    first: torch.Tensor | None = None,
    scale: float | None = None,
    terms: Terms | None = None,
    sink_grads: torch.Tensor | None = None,
    tmp_array_limit_gb: float = 3.0,
) -> torch.Tensor:
    """Return the gradient of the queries and add the rows' gradients to the given tensors.

    With P the weights and T = grad Vᵀ: dV = Pᵀ grad, E = P (T - rowsum(P T)), dQ = scale E K,
    dK = scale Eᵀ Q, with dV and dK summed over each KV head's query heads. A softcap's slope is a
    factor of E. A sink has the weight w = 1 - sum(P) and the gradient -w rowsum(P T).

    Args:
        grad: gradient of the output, `(batch, query_heads, m, width of V)`.
        query: as for `attend`.
        keys: as for `attend`.
        values: as for `attend`.
        key_grads: fp32, in the shape of the keys.
        value_grads: fp32, in the shape of the values.
        token_pos: as for `attend`.
        input_pos: as for `attend`.
        first: as for `attend`.
        scale: as for `attend`.
        terms: as for `attend`.
        sink_grads: fp32 `(query_heads,)`, added to. None drops the gradients of the sinks.
        tmp_array_limit_gb: bound of the twin's temporary arrays, in 10^9 bytes.

    Raises:
        ConfigError: shapes do not match, or the limit is below the weights of a query.
    """
    _check(query, keys, values, token_pos)
    _check_gradients((grad, key_grads, value_grads), query, keys, values)
    batch, heads, new, dim = query.shape
    groups, rows = keys.shape[1], keys.shape[2]
    each = heads // groups
    factor: float = dim**-0.5 if scale is None else scale
    known = terms is None and ready(query.device)
    if known and takes_back(query, keys, values, key_grads, value_grads):
        flash = Flash(
            query,
            keys,
            values,
            token_pos=token_pos,
            input_pos=input_pos,
            first=first,
            scale=factor,
        )
        return _by_kernel(flash, grad, key_grads, value_grads)
    grouped = query.unflatten(1, (groups, each)).float() * factor
    given = grad.unflatten(1, (groups, each)).float()
    plain, stated = keys.float(), values.float()
    found = torch.empty_like(grouped)
    sight = _Sight.of(token_pos, input_pos, new, first)
    # Two arrays of weights are live here, twice as many as in the forward pass.
    for lo, hi in _slices(new, 8 * batch * heads * rows, query.device, tmp_array_limit_gb):
        size = (each, hi - lo)
        part, back = grouped[:, :, :, lo:hi].flatten(2, 3), given[:, :, :, lo:hi].flatten(2, 3)
        products = torch.matmul(part, plain.mT).unflatten(2, size)
        weights, slope = _weights(products, sight.hidden(lo, hi), terms)
        if sight.blind:
            weights.nan_to_num_(0.0)  # padding has no visible rows
        left = 1 - weights.sum(dim=-1) if sink_grads is not None else None
        weights = weights.flatten(2, 3)
        value_grads += torch.matmul(weights.mT, back)
        error = torch.matmul(back, stated.mT)
        mean = (back * torch.matmul(weights, stated)).sum(dim=-1, keepdim=True)
        if sink_grads is not None and left is not None:
            sink_grads -= (mean.view_as(left) * left).sum(dim=(0, 3)).flatten()
        error -= mean
        error *= weights
        if slope is not None:
            error *= slope.flatten(2, 3)
        key_grads += torch.matmul(error.mT, part)
        found[:, :, :, lo:hi] = torch.matmul(error, plain).mul_(factor).unflatten(2, size)
    return found.flatten(1, 2).to(query.dtype)


def _by_kernel(
    flash: Flash, grad: torch.Tensor, key_grads: torch.Tensor, value_grads: torch.Tensor
) -> torch.Tensor:
    flash.attend()
    back = FlashBackward(flash, grad, key_grads, value_grads)
    back.start()
    return back.query_grads


def _weights(
    products: torch.Tensor, hidden: torch.Tensor, terms: Terms | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the weights of rows from their products, and the slope of a softcap."""
    if terms is None:
        return torch.softmax(products.masked_fill_(hidden, -torch.inf), dim=-1), None
    products = terms.capped(products)
    slope = terms.slope(products)
    return terms.softmax(products.masked_fill_(hidden, -torch.inf)), slope


def _check_gradients(
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    shapes = [tuple(each.shape) for each in gradients]
    if shapes != [(*query.shape[:3], values.shape[3]), keys.shape, values.shape]:
        raise ConfigError(
            f"gradients {shapes[0]}, {shapes[1]} and {shapes[2]} do not go with queries "
            f"{tuple(query.shape)}, keys {tuple(keys.shape)} and values {tuple(values.shape)}"
        )
