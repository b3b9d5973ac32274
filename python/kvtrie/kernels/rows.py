"""Rows: raw copies between two tensors of bytes, row by row.

Long runs of adjacent rows use the GPU's copy engine, without its multiprocessors. Short runs would
take longer to start than to copy. Between a GPU and pinned memory, or on the GPU, a single kernel
copies them all.
Invariant: all rows have the same width, and source and target rows do not overlap. Cost: a driver
call per run of rows adjacent on both sides, or a launch.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvtrie.errors import ConfigError
from kvtrie.kernels.cubin import launchable
from kvtrie.kernels.formats import VECTOR_BYTES
from kvtrie.kernels.launch import Launch, start

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

__all__ = ["copy_rows"]

_SHORT_BYTES = 1 << 20
"""Average bytes of a run below which the kernel is used: a driver call takes as long."""

_THREADS = 1024
_AT_ONCE = 4  # as in paged_copy.cu
_LINK_BLOCKS = 4  # fill a link, and leave the other multiprocessors to computation
_CARD_BLOCKS = 1024
_MOST_VECTORS = 1 << 30  # of a launch: the kernel counts vectors in 32 bits


def copy_rows(
    source: torch.Tensor,
    source_rows: NDArray[np.int64],
    target: torch.Tensor,
    rows: NDArray[np.int64],
) -> None:
    """Copy rows of a tensor to rows of a second tensor, on a GPU without waiting.

    Args:
        source: uint8 `(n, bytes)`.
        source_rows: int64, indices of rows in the source.
        target: uint8 `(m, bytes)`.
        rows: int64, indices of rows in the target, all different.

    Raises:
        ConfigError: a row beyond its tensor. Nothing is copied then.
    """
    if not len(rows):
        return
    breaks = np.flatnonzero((np.diff(rows) != 1) | (np.diff(source_rows) != 1)) + 1
    if len(breaks) and rows.size * source.shape[1] < _SHORT_BYTES * (len(breaks) + 1):
        device = _card(source, target)
        if device is not None:
            _check(source, source_rows)
            _check(target, rows)
            for what in launches(source, source_rows, target, rows, device):
                start("paged_copy", what, device)
            return
    for begin, end in pairwise((0, *breaks.tolist(), len(rows))):
        to, of = int(rows[begin]), int(source_rows[begin])
        part = source[of : of + end - begin]
        target[to : to + end - begin].copy_(part, non_blocking=True)


def launches(
    source: torch.Tensor,
    source_rows: NDArray[np.int64],
    target: torch.Tensor,
    rows: NDArray[np.int64],
    device: torch.device,
) -> Iterator[Launch]:
    """Yield launches of the kernel over any number of rows, with row indices on `device`."""
    width = source.shape[1] // VECTOR_BYTES
    most = _MOST_VECTORS // width
    blocks = _CARD_BLOCKS if source.device == target.device else _LINK_BLOCKS
    numbers = torch.as_tensor(np.stack((source_rows, rows)))
    if device.type == "cuda":  # copies from unpinned memory wait for the stream
        numbers = numbers.pin_memory().to(device, non_blocking=True)
    for first in range(0, len(rows), most):
        of, to = numbers[:, first : first + most]
        vectors = len(to) * width
        yield Launch(
            row="fp32",  # any format: bytes have none
            cell="fp32",
            grid=(min(blocks, -(-vectors // (_AT_ONCE * _THREADS))), 1, 1),
            block=(_THREADS, 1, 1),
            arguments=(
                source,
                target,
                source.stride(0) // VECTOR_BYTES,
                target.stride(0) // VECTOR_BYTES,
                width,
                of,
                to,
                len(to),
            ),
        )


def _card(source: torch.Tensor, target: torch.Tensor) -> torch.device | None:
    """Return the GPU with access to both tensors, or None without such a device."""
    cards = {each.device for each in (source, target) if each.device.type == "cuda"}
    if len(cards) != 1 or not launchable():
        return None
    for each in (source, target):
        apart = each.data_ptr() | each.shape[1] | each.stride(0)
        if apart % VECTOR_BYTES or not (each.device.type == "cuda" or each.is_pinned()):
            return None
    return cards.pop()


def _check(tensor: torch.Tensor, rows: NDArray[np.int64]) -> None:
    if not 0 <= rows.min() <= rows.max() < len(tensor):
        raise ConfigError(f"rows {rows.min()} to {rows.max()}, 0 to {len(tensor) - 1} wanted")
