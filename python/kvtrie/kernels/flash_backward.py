"""FlashBackward: the gradients of attention by `cuda/attend_backward.cu`, after `Flash`.

Invariant: callers check support in advance (`takes_back`) and use torch otherwise. The rows'
gradients are added to the given tensors. Cost: a second `attend` for sums and outputs, a product of
two arrays of a step's size, and a launch.
"""

from __future__ import annotations

import torch

from kvtrie.kernels.flash import Flash, starts_at_vectors, takes, width_of
from kvtrie.kernels.formats import ROWS
from kvtrie.kernels.launch import Launch, start

__all__ = ["FlashBackward", "takes_back"]

_WIDEST_BYTES = 512  # of a head: wider heads do not fit into a block


def takes_back(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    key_grads: torch.Tensor,
    value_grads: torch.Tensor,
) -> bool:
    """Return whether the kernel supports these tensors, see `takes`."""
    return (
        takes(query, keys, values)
        and width_of(query) * query.dtype.itemsize <= _WIDEST_BYTES
        and all(
            each.dtype == torch.float32 and each.stride(-1) == 1
            for each in (key_grads, value_grads)
        )
    )


class FlashBackward:
    """Launch of the kernel over a layer's queries and rows, see `attend_backward`.

    Args:
        flash: the forward pass, after `attend`.
        grad: gradient of its output, `(batch, query_heads, m, dim)`.
        key_grads: fp32 `(batch, kv_heads, rows, dim)`, added to.
        value_grads: like `key_grads`.

    Attributes:
        query_grads: `(batch, query_heads, m, dim)` in the queries' type, written.
    """

    def __init__(
        self,
        flash: Flash,
        grad: torch.Tensor,
        key_grads: torch.Tensor,
        value_grads: torch.Tensor,
    ) -> None:
        self._flash = flash
        given = grad.to(flash.out.dtype)
        self._grad = given if starts_at_vectors(given) else given.contiguous()
        self._row_grads = key_grads, value_grads
        self._delta = (grad.float() * flash.out.float()).sum(dim=-1)
        self.query_grads = torch.empty_like(flash.out)

    def start(self) -> None:
        """Fill `query_grads` and add to the rows' gradients."""
        start("attend_backward", self.launch(), self.query_grads.device)

    def launch(self) -> Launch:
        """Return the launch."""
        batch, heads, new, _ = self.query_grads.shape
        groups, rows = self._row_grads[0].shape[1:3]
        width = width_of(self.query_grads)
        own = _own(width * self.query_grads.dtype.itemsize)
        tiles = -(-(heads // groups) * new // own) + 2 * -(-rows // own)
        given = (self._grad, *self._grad.stride()[:3], self._flash.lse, self._delta)
        added = [part for each in self._row_grads for part in (each, *each.stride()[:3])]
        arguments = (*self._flash.arguments, *given, self.query_grads, *added)
        name = ROWS[self.query_grads.dtype]
        return Launch(name, name, (tiles, groups, batch), (2 * own, 1, 1), arguments, width)


def _own(width_bytes: int) -> int:
    """Return the number of queries or rows of a block, as in attend_backward.cu."""
    if width_bytes <= 128:  # noqa: PLR2004 - as in attend_backward.cu
        return 64
    return 32 if width_bytes <= 256 else 16  # noqa: PLR2004
