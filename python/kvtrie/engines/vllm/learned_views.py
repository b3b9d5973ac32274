"""Learned views: K and V of an engine's block by token, head and number, found by a test pattern.

An engine's attention kernel may store a block in any order: K transposed, numbers in pairs, K and V
interleaved. The engine's own kernel writes numbered rows into a block. The position of each number
gives the strides of views over all blocks, in the order token, head, number.
Invariant: a layout without strides, or with bytes other than K and V, is refused. The block has its
old bytes afterwards. Cost: a few kernel calls and arithmetic per layer, at start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch

from kvtrie.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["BlockShape", "WriteRows", "learned_views"]

_DIGIT = 128  # base of the pattern's digits: a digit plus 1 is exact in every format


class BlockShape(NamedTuple):
    """Tokens of a block, heads of K and of V on this rank, and numbers of a head."""

    tokens: int
    heads: int
    dim: int


class WriteRows(Protocol):
    """The engine's kernel for writing tokens into its memory."""

    def __call__(self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        """Write rows.

        Args:
            keys: K of each token, `(n, heads, dim)`.
            values: V of each token, `(n, heads, dim)`.
            slots: int64 `(n,)`, `block * tokens of a block + token of the block`.
        """
        ...


def learned_views(
    memory: torch.Tensor, axis: int, shape: BlockShape, write: WriteRows
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V of all blocks as views of an engine's tensor.

    Args:
        memory: the tensor of a layer.
        axis: the axis of its blocks.
        shape: tokens, heads and numbers of a block.
        write: the engine's kernel for this tensor.

    Returns:
        Views of K and of V. The first axis is the block, and the further axes in order run over
        token, head and number.

    Raises:
        ConfigError: a block with bytes other than K and V, or an order without strides.
    """
    blocks = memory.detach().movedim(axis, 0)
    count = 2 * shape.tokens * shape.heads * shape.dim
    if blocks[0].numel() != count:
        raise ConfigError(
            f"a block of {blocks[0].numel()} numbers in the engine's memory, {count} of K and V "
            f"wanted: {shape.tokens} tokens, {shape.heads} heads of {shape.dim}"
        )
    before = blocks[0].clone()
    try:
        found = _numbers(blocks[0], shape, write)
    finally:
        blocks[0].copy_(before)
    where = _offsets(blocks[0]).reshape(-1)[np.argsort(found)]
    sides = where.reshape(2, shape.tokens, shape.heads, shape.dim)
    views = _view(blocks, sides[0]), _view(blocks, sides[1])
    _check_views(blocks, views, shape, write)
    return views


def _numbers(block: torch.Tensor, shape: BlockShape, write: WriteRows) -> NDArray[np.int64]:
    """Return for each place of a block the index of the number written there by the kernel."""
    rows = torch.arange(2 * shape.tokens * shape.heads * shape.dim)
    found = np.zeros(len(rows), dtype=np.int64)
    weight = 1
    while weight < len(rows):
        block.zero_()
        digits = rows // weight % _DIGIT + 1
        sides = digits.to(block.dtype).to(block.device).view(2, *shape)
        write(sides[0], sides[1], torch.arange(shape.tokens, device=block.device))
        read = block.double().cpu().reshape(-1).numpy().round().astype(np.int64)
        found += (read - 1) * weight
        weight *= _DIGIT
    if not np.array_equal(np.sort(found), rows.numpy()):
        raise ConfigError(
            "the engine's kernel has changed numbers of a test pattern or put them outside of the "
            "block, so the layout of its memory is not known"
        )
    return found


def _offsets(block: torch.Tensor) -> NDArray[np.int64]:
    """Return for each number of the block its offset from the first."""
    grid = np.zeros(tuple(block.shape), dtype=np.int64)
    for at, (size, stride) in enumerate(zip(block.shape, block.stride(), strict=True)):
        along = [1] * block.dim()
        along[at] = size
        grid += (np.arange(size) * stride).reshape(along)
    return grid


def _view(blocks: torch.Tensor, where: NDArray[np.int64]) -> torch.Tensor:
    """Return a view for the places of K or V, with an axis or more per token, head, number."""
    first = int(where[0, 0, 0])
    parts = [where[:, 0, 0] - first, where[0, :, 0] - first, where[0, 0, :] - first]
    together = parts[0][:, None, None] + parts[1][:, None] + parts[2]
    if not np.array_equal(together + first, where):
        raise ConfigError("tokens, heads and numbers of a block have no strides in this layout")
    axes = [axis for part in parts for axis in _axes(part)]
    return blocks.as_strided(
        [len(blocks), *(size for size, _ in axes)],
        [blocks.stride(0), *(stride for _, stride in axes)],
        blocks.storage_offset() + first,
    )


def _axes(places: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Return sizes and strides for these places, outermost first."""
    if len(places) == 1:
        return [(1, 1)]
    step, run = int(places[1]), 2
    while run < len(places) and places[run] == run * step:
        run += 1
    if step < 1 or len(places) % run:
        raise ConfigError(f"places {places[:8].tolist()} of a block have no strides")
    if run == len(places):
        return [(run, step)]
    outer = places[::run]
    if not np.array_equal((outer[:, None] + np.arange(run) * step).reshape(-1), places):
        raise ConfigError(f"places {places[:8].tolist()} of a block have no strides")
    return [*_axes(outer), (run, step)]


def _check_views(
    blocks: torch.Tensor,
    views: tuple[torch.Tensor, torch.Tensor],
    shape: BlockShape,
    write: WriteRows,
) -> None:
    """Raise unless the views read back the kernel's rows from the last block."""
    last = len(blocks) - 1
    before = blocks[last].clone()
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn((2, *shape), generator=generator).to(blocks.dtype).to(blocks.device)
    try:
        slots = torch.arange(shape.tokens, device=blocks.device) + last * shape.tokens
        write(rows[0], rows[1], slots)
        good = all(
            torch.equal(view[last].reshape(shape), side)
            for view, side in zip(views, rows, strict=True)
        )
    finally:
        blocks[last].copy_(before)
    if not good:
        raise ConfigError("the engine's blocks differ in their layout, which is not known then")
