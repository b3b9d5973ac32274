"""Flash: attention by `cuda/attend.cu`, and the weights of rows by `cuda/attend_weights.cu`.

Invariant: callers check support in advance (`takes`) and use torch otherwise. Cost: a launch, a
second launch for weights, and four bytes per query between them.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import torch

from kvtrie.kernels.cubin import launchable
from kvtrie.kernels.formats import ROWS, VECTOR_BYTES
from kvtrie.kernels.launch import Launch, start

if TYPE_CHECKING:
    from kvtrie.kernels.call import Kernel

__all__ = ["Flash", "ready", "starts_at_vectors", "takes", "width_of"]

_WIDEST = 256
_STEP = 32  # compiled widths are multiples of this
_MOST_BLOCKS = 65_535  # of a grid, along y and z


def takes(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Return whether the kernels support the formats, widths and strides of these tensors."""
    dim, every = query.shape[-1], (query, keys, values)
    return (
        query.dtype in ROWS
        and all(each.dtype == query.dtype and each.shape[-1] == dim for each in every)
        and 0 < dim <= _WIDEST
        and dim * query.dtype.itemsize % VECTOR_BYTES == 0
        and all(starts_at_vectors(each) for each in every)
        and max(*query.shape[:2]) <= _MOST_BLOCKS
        and keys.shape[2] > 0
        and not (torch.is_grad_enabled() and any(each.requires_grad for each in every))
    )


def starts_at_vectors(each: torch.Tensor) -> bool:
    """Return whether all rows are contiguous and begin at a vector of 16 bytes."""
    apart = [step * each.dtype.itemsize for step in each.stride()[:-1]]
    return each.stride(-1) == 1 and not any(x % VECTOR_BYTES for x in (each.data_ptr(), *apart))


def width_of(query: torch.Tensor) -> int:
    """Return the numbers of a head with room in a block."""
    return -(-query.shape[-1] // _STEP) * _STEP


class Flash:
    """Launches of both kernels over a layer's queries and rows, see `attend`.

    Args:
        query: `(batch, query_heads, m, dim)`.
        keys: `(batch, kv_heads, rows, dim)`.
        values: like `keys`.
        token_pos: int64 `(batch, kv_heads, rows)`.
        input_pos: position of the first query.
        first: int64 `(batch,)`, or None.
        scale: factor of the products.

    Attributes:
        out: `(batch, query_heads, m, dim)`, written by `attend`.
        lse: fp32 `(batch, query_heads, m)`, the logarithm of each query's sum of exponentials.
        weights: fp32 `(batch, query_heads, rows)`, written by `attend_weights`.
    """

    def __init__(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        token_pos: torch.Tensor,
        input_pos: int,
        first: torch.Tensor | None,
        scale: float,
    ) -> None:
        self._rows = query, keys, values
        positions = token_pos.long()
        self._pos = positions if positions.stride(-1) == 1 else positions.contiguous()
        self._first = None if first is None else first.long().contiguous()
        self._input_pos = input_pos
        [self._scale] = struct.unpack("<I", struct.pack("<f", scale))  # its bits
        batch, heads, new, _ = query.shape
        self.out = torch.empty_like(query, memory_format=torch.contiguous_format)
        self.lse = query.new_empty((batch, heads, new), dtype=torch.float32)
        # The kernels write every number of these tensors.
        self.weights = query.new_empty((batch, heads, keys.shape[2]), dtype=torch.float32)

    def attend(self) -> None:
        """Fill `out` and `lse`."""
        self._start("attend", self.launch("attend"))

    def sum_weights(self) -> None:
        """Fill `weights`, after `attend`."""
        self._start("attend_weights", self.launch("attend_weights"))

    def _start(self, kernel: Kernel, what: Launch) -> None:
        start(kernel, what, self.out.device)

    def launch(self, kernel: Kernel) -> Launch:
        """Return the launch of a kernel, "attend" or "attend_weights"."""
        query, keys, _ = self._rows
        batch, heads, new, _ = query.shape
        groups, rows = keys.shape[1], keys.shape[2]
        width = width_of(query)
        queries, key_tiles = _tiles(width * query.dtype.itemsize)
        if kernel == "attend":
            grid = (-(-(heads // groups) * new // queries), groups, batch)
            arguments = (*self.arguments, self.out, *self.out.stride()[:3], self.lse)
        else:
            grid = (-(-rows // key_tiles), heads, batch)
            arguments = (*self._query_arguments, *self._sight, self.lse, self.weights)
        name = ROWS[query.dtype]
        return Launch(name, name, grid, (2 * queries, 1, 1), arguments, width)

    @property
    def arguments(self) -> tuple[torch.Tensor | int, ...]:
        """Input arguments of `attend`, also the first arguments of its backward pass."""
        values = self._rows[2]
        return (*self._query_arguments, values, *values.stride()[:3], *self._sight)

    @property
    def _query_arguments(self) -> tuple[torch.Tensor | int, ...]:
        query, keys, _ = self._rows
        return (query, *query.stride()[:3], keys, *keys.stride()[:3])

    @property
    def _sight(self) -> tuple[torch.Tensor | int, ...]:
        """Arguments for the mask, and sizes."""
        query, keys, _ = self._rows
        _, heads, new, dim = query.shape
        first = 0 if self._first is None else self._first
        sizes = (heads // keys.shape[1], new, keys.shape[2], dim)
        return (self._pos, *self._pos.stride()[:2], first, self._input_pos, self._scale, *sizes)


def _tiles(width_bytes: int) -> tuple[int, int]:
    """Return the queries and keys of a block, as in attend.cuh."""
    if width_bytes <= 256:  # noqa: PLR2004 - as in attend.cuh
        return 64, 32
    return (32, 16) if width_bytes <= 512 else (16, 8)  # noqa: PLR2004


def ready(device: torch.device) -> bool:
    """Return whether a device is CUDA and the extra `cuda` is installed."""
    return device.type == "cuda" and launchable()
