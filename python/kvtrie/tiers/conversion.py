"""Conversion: copies units between pools with different number formats.

Tokens pass through rows in a format native to at least one side: narrowed numbers are rounded once,
and unchanged formats keep their bits. The conversion runs on the device (`gather` and `scatter` of
`kvtrie.kernels`, `unpack` and `pack` for int4, their CPU twins without a device), so the link
carries the bytes of the lower tier's format.
Invariant: an impossible conversion is refused before any memory is allocated.
Cost: a launch each way per piece, and beyond the pools at most `PIECE_BYTES` of rows and the same
of units.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from kvtrie.errors import ConfigError
from kvtrie.kernels import Packed, Pages, copy_rows, gather, pack, scatter, unpack
from kvtrie.kernels.checks import check_plane, vector
from kvtrie.kernels.formats import ROWS
from kvtrie.kernels.int4 import check_packed
from kvtrie.tiers.block_format import FORMAT

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from typing import Self

    from numpy.typing import NDArray

    from kvtrie.tiers.block_format import BlockFormat

__all__ = ["PIECE_BYTES", "Dense", "agree", "check", "convert", "pages"]

PIECE_BYTES = 8 << 20
"""Maximum bytes of rows in flight."""


class Units(Protocol):
    """Memory of units, in a pool or outside."""

    @property
    def block_format(self) -> BlockFormat:
        """Format of a unit."""
        ...

    @property
    def planes(self) -> tuple[torch.Tensor, ...]:
        """The bytes, uint8 `(units, bytes per unit)`, separate for K and V or joined."""
        ...

    @property
    def device(self) -> torch.device:
        """Device of the memory."""
        ...

    @cached_property
    def pages(self) -> Pages:
        """All units as blocks of a single layer."""
        ...


@dataclass(frozen=True)
class Dense:
    """Consecutive units outside a pool.

    Attributes:
        block_format: format of a unit.
        planes: the bytes, uint8 `(units, bytes per unit)`, separate for K and V or joined.
    """

    block_format: BlockFormat
    planes: tuple[torch.Tensor, ...]

    @classmethod
    def zeros(cls, fmt: BlockFormat, units: int, device: torch.device) -> Self:
        """Return units of zeros, including the padding."""
        shapes = ((units, size) for size in fmt.planes())
        zeros = partial(torch.zeros, dtype=torch.uint8, device=device)
        return cls(fmt, tuple(map(zeros, shapes)))

    def fill(self, rows: torch.Tensor) -> None:
        """Copy the bytes of units, uint8 `(units, bytes per unit)`, into this memory."""
        start = 0
        for plane in self.planes:
            plane.copy_(rows[:, start : start + plane.shape[1]])
            start += plane.shape[1]

    @property
    def device(self) -> torch.device:
        """Device of the memory."""
        return self.planes[0].device

    @cached_property
    def pages(self) -> Pages:
        """All units as blocks of a single layer."""
        return pages(self.block_format, self.planes, len(self.planes[0]))


def pages(fmt: BlockFormat, memory: Sequence[torch.Tensor], units: int) -> Pages:
    """Return units of memory as blocks of a single layer, with a slot per token of any layer."""
    return Pages.of(
        memory,
        fmt.layout,
        blocks=units,
        block_tokens=fmt.block_tokens,
        heads=fmt.heads,
        head_dim=fmt.head_dim,
        v_head_dim=fmt.v_head_dim,
    )


def check(one: BlockFormat, other: BlockFormat) -> None:
    """Raise unless KV can be converted between two formats in both directions.

    Raises:
        ConfigError: a format unknown to the kernels, externally supplied scales, or heads
            unsupported by the kernels.
    """
    for fmt in (one, other):
        if fmt.layout.opaque:
            raise ConfigError(
                f"the bytes of {fmt.layout.opaque!r} mean something to its engine only, so no tier "
                "below may keep them in another format"
            )
    step = vector(_between(one, other))
    for fmt in (one, other):
        if fmt.layout.packed:
            for dim in (fmt.head_dim, fmt.v_head_dim):
                check_packed(dim)
            continue
        if fmt.layout.scales in {"tensor", "head"}:
            raise ConfigError(
                f"scales are by {fmt.layout.scales!r}, 'token' or 'group' wanted: a tier computes "
                "no other scales"
            )
        shapes = [torch.empty(size, dtype=torch.uint8, device="meta") for size in fmt.planes()]
        found = pages(fmt, shapes, 1)
        for plane in found.planes:
            check_plane(plane, found.covers, step)


def agree(tiers: Iterable[tuple[str, BlockFormat, bool]]) -> None:
    """Raise unless tiers, from the first tier down, may exchange KV.

    Args:
        tiers: a name, the format, and whether the tier is memory with conversion. A storage takes
            the bytes of the memory above it.

    Raises:
        ConfigError: two tiers differ (the error shows both values), or KV cannot be converted.
    """
    named = list(tiers)
    for (above, wanted), (name, fmt, memory) in zip(_above(named), named, strict=True):
        if differences := wanted.differences(fmt, but=FORMAT if memory else ()):
            raise ConfigError(f"{above} and {name} differ: {', '.join(differences)}")
        if fmt.layout != wanted.layout:
            try:
                check(wanted, fmt)
            except ConfigError as error:
                raise ConfigError(f"{above} and {name} cannot exchange KV: {error}") from error


def _above(named: Iterable[tuple[str, BlockFormat, bool]]) -> Iterator[tuple[str, BlockFormat]]:
    """Yield for each tier its exchange partner: the memory above, or itself for the first tier."""
    above: tuple[str, BlockFormat] | None = None
    for name, fmt, memory in named:
        yield above or (name, fmt)
        if memory or above is None:
            above = name, fmt


def convert(
    source: Units, source_units: NDArray[np.int64], target: Units, units: NDArray[np.int64]
) -> None:
    """Copy whole units between pools with conversion, without waiting on a GPU.

    Args:
        source: the memory to read.
        source_units: int64 `(n,)`.
        target: the memory to write.
        units: int64 `(n,)`, all different.
    """
    fmt = source.block_format
    device = source.device if source.device.type == "cuda" else target.device
    between = _between(fmt, target.block_format)
    widths = (fmt.head_dim, *(() if fmt.layout.latent else (fmt.v_head_dim,)))
    size = fmt.block_tokens * fmt.heads * sum(widths) * between.itemsize
    most = min(len(units), max(1, PIECE_BYTES // size))
    rows = [
        torch.empty((most * fmt.block_tokens, fmt.heads, dim), dtype=between, device=device)
        for dim in widths
    ]
    for first in range(0, len(units), most):
        piece = slice(first, first + most)
        source_piece, target_piece = source_units[piece], units[piece]
        part = [each[: len(target_piece) * fmt.block_tokens] for each in rows]
        _read(source, source_piece, part, device)
        _write(target, target_piece, part, device)


def _read(
    source: Units, units: NDArray[np.int64], rows: Sequence[torch.Tensor], device: torch.device
) -> None:
    if source.device != device:
        staged_units = np.arange(len(units))
        staged = Dense.zeros(source.block_format, len(units), device)
        for plane, part in zip(source.planes, staged.planes, strict=True):
            copy_rows(plane, units, part, staged_units)
        source, units = staged, staged_units
    if source.block_format.layout.packed:
        for part, each in zip(_packed(source), rows, strict=True):
            unpack(part, torch.as_tensor(units), each)
    else:
        gather(source.pages, _slots(source.block_format, units), *rows)


def _write(
    target: Units, units: NDArray[np.int64], rows: Sequence[torch.Tensor], device: torch.device
) -> None:
    if target.device != device:
        staged_units = np.arange(len(units))
        staged = Dense.zeros(target.block_format, len(units), device)
        _write(staged, staged_units, rows, device)
        for plane, part in zip(target.planes, staged.planes, strict=True):
            copy_rows(part, staged_units, plane, units)
    elif target.block_format.layout.packed:
        for part, each in zip(_packed(target), rows, strict=True):
            pack(part, torch.as_tensor(units), each)
    else:
        scatter(target.pages, _slots(target.block_format, units), *rows)


def _packed(memory: Units) -> list[Packed]:
    """Return K and V of int4 memory."""
    fmt, planes = memory.block_format, memory.planes
    parts = fmt.layout.packed_parts(fmt.block_tokens, fmt.heads, fmt.head_dim, fmt.v_head_dim)
    return [
        Packed(
            planes[part.plane],
            part.codes_at,
            part.scales_at,
            fmt.block_tokens,
            fmt.heads,
            dim,
            keys=at == 0,
        )
        for at, (part, dim) in enumerate(zip(parts, (fmt.head_dim, fmt.v_head_dim), strict=True))
    ]


def _slots(fmt: BlockFormat, units: NDArray[np.int64]) -> torch.Tensor:
    within = torch.arange(fmt.block_tokens)
    return (torch.as_tensor(units)[:, None] * fmt.block_tokens + within).view(-1)


def _between(one: BlockFormat, other: BlockFormat) -> torch.dtype:
    """Return the format of intermediate rows: the wider format, so that only one side converts."""
    formats = [getattr(torch, fmt.layout.dtype) for fmt in (one, other) if not fmt.layout.packed]
    supported: list[torch.dtype] = [dtype for dtype in formats if dtype in ROWS]
    return max(supported, key=lambda dtype: dtype.itemsize, default=torch.float32)
