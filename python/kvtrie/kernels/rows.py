"""Rows: raw copies between two tensors of bytes, row by row.

Long runs of neighbours go through the card's copy engine, which leaves its multiprocessors alone.
Short ones would take longer to start than to copy: between a card and pinned memory, or on the
card, one kernel takes them all.
Invariant: rows are of one width, and those of a copy do not overlap. Cost: one call of the driver
per run of neighbours on both sides, or one launch.
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
"""Runs below this on average go through the kernel: a call of the driver takes as long as these."""

_THREADS = 1024
_AT_ONCE = 4  # as in paged_copy.cu
_LINK_BLOCKS = 4  # fill a link, and leave the other multiprocessors to computation
_CARD_BLOCKS = 1024
_MOST_VECTORS = 1 << 30  # of a launch: the kernel counts them in 32 bits


def copy_rows(
    source: torch.Tensor,
    source_rows: NDArray[np.int64],
    target: torch.Tensor,
    rows: NDArray[np.int64],
) -> None:
    """Copy rows of one tensor to rows of another; on a GPU without waiting.

    Args:
        source: uint8 `(n, bytes)`.
        source_rows: int64, which of them.
        target: uint8 `(m, bytes)`.
        rows: int64, which of its rows they become, all different.

    Raises:
        ConfigError: a row beyond its tensor; nothing is copied then.
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
    """Launches of the kernel over any number of rows; `device` holds the rows' numbers."""
    width = source.shape[1] // VECTOR_BYTES
    most = _MOST_VECTORS // width
    blocks = _CARD_BLOCKS if source.device == target.device else _LINK_BLOCKS
    numbers = torch.as_tensor(np.stack((source_rows, rows)))
    if device.type == "cuda":  # from plain memory the driver waits for the stream first
        numbers = numbers.pin_memory().to(device, non_blocking=True)
    for first in range(0, len(rows), most):
        of, to = numbers[:, first : first + most]
        vectors = len(to) * width
        yield Launch(
            row="fp32",  # bytes have no format; any will do
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
    """The device whose kernel can copy between both; None where there is none."""
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
