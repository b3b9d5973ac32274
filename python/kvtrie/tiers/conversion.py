"""Conversion: units copied between pools that keep KV in different formats.

Tokens go through rows in a format that at least one of the two understands by itself: what is
narrowed is rounded once, what keeps its format keeps its bits. It runs where the device is
(`gather` and `scatter` of `kvtrie.kernels`, `unpack` and `pack` for int4, their twins where there
is none), so that the link carries the bytes of the lower tier's format.
Invariant: whatever cannot be converted is refused before any memory is taken. Cost: one launch each
way per piece; in addition to the pools at most `PIECE_BYTES` of rows, and as many bytes of units.
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
"""Rows that are under way at once."""


class Units(Protocol):
    """Memory of units: a pool's, or some outside of one."""

    @property
    def block_format(self) -> BlockFormat:
        """Format of a unit."""
        ...

    @property
    def planes(self) -> tuple[torch.Tensor, ...]:
        """The bytes, uint8 `(units, bytes per unit)`: K's and V's, or both."""
        ...

    @property
    def device(self) -> torch.device:
        """Device of the memory."""
        ...

    @cached_property
    def pages(self) -> Pages:
        """All units as blocks of one layer."""
        ...


@dataclass(frozen=True)
class Dense:
    """Units one after another, outside a pool.

    Attributes:
        block_format: format of a unit.
        planes: the bytes, uint8 `(units, bytes per unit)`: K's and V's, or both.
    """

    block_format: BlockFormat
    planes: tuple[torch.Tensor, ...]

    @classmethod
    def zeros(cls, fmt: BlockFormat, units: int, device: torch.device) -> Self:
        """Return units of zeros, also in the padding."""
        shapes = ((units, size) for size in fmt.planes())
        zeros = partial(torch.zeros, dtype=torch.uint8, device=device)
        return cls(fmt, tuple(map(zeros, shapes)))

    def fill(self, rows: torch.Tensor) -> None:
        """Take the bytes of units, uint8 `(units, bytes per unit)`."""
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
        """All units as blocks of one layer."""
        return pages(self.block_format, self.planes, len(self.planes[0]))


def pages(fmt: BlockFormat, memory: Sequence[torch.Tensor], units: int) -> Pages:
    """Return all units of some memory as blocks of one layer: a token of any layer has a slot."""
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
    """Raise unless KV can go from one format to another and back.

    Raises:
        ConfigError: a format that kernels do not know, scales that would have to be given, heads
            that kernels cannot serve.
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
                f"scales by {fmt.layout.scales!r} would have to be given; a tier finds those of "
                "each 'token' or 'group'"
            )
        shapes = [torch.empty(size, dtype=torch.uint8, device="meta") for size in fmt.planes()]
        found = pages(fmt, shapes, 1)
        for plane in found.planes:
            check_plane(plane, found.covers, step)


def agree(tiers: Iterable[tuple[str, BlockFormat, bool]]) -> None:
    """Raise unless tiers, from the first one down, may exchange KV.

    Args:
        tiers: a name, the format, and whether it is memory, which converts; anything else takes the
            bytes of the memory above it.

    Raises:
        ConfigError: two of them differ, with both numbers; or KV cannot be converted.
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
    """For each tier the memory that it exchanges KV with; the first one itself for the first."""
    above: tuple[str, BlockFormat] | None = None
    for name, fmt, memory in named:
        yield above or (name, fmt)
        if memory or above is None:
            above = name, fmt


def convert(
    source: Units, source_units: NDArray[np.int64], target: Units, units: NDArray[np.int64]
) -> None:
    """Copy whole units from pool to pool, each in its format; on a GPU without waiting for it.

    Args:
        source: where from.
        source_units: int64 `(n,)`.
        target: where to.
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
        here, there = source_units[piece], units[piece]
        part = [each[: len(there) * fmt.block_tokens] for each in rows]
        _read(source, here, part, device)
        _write(target, there, part, device)


def _read(
    source: Units, units: NDArray[np.int64], rows: Sequence[torch.Tensor], device: torch.device
) -> None:
    if source.device != device:
        staged, near = Dense.zeros(source.block_format, len(units), device), np.arange(len(units))
        for plane, part in zip(source.planes, staged.planes, strict=True):
            copy_rows(plane, units, part, near)
        source, units = staged, near
    if source.block_format.layout.packed:
        for part, each in zip(_packed(source), rows, strict=True):
            unpack(part, torch.as_tensor(units), each)
    else:
        gather(source.pages, _slots(source.block_format, units), *rows)


def _write(
    target: Units, units: NDArray[np.int64], rows: Sequence[torch.Tensor], device: torch.device
) -> None:
    if target.device != device:
        staged, near = Dense.zeros(target.block_format, len(units), device), np.arange(len(units))
        _write(staged, near, rows, device)
        for plane, part in zip(target.planes, staged.planes, strict=True):
            copy_rows(part, near, plane, units)
    elif target.block_format.layout.packed:
        for part, each in zip(_packed(target), rows, strict=True):
            pack(part, torch.as_tensor(units), each)
    else:
        scatter(target.pages, _slots(target.block_format, units), *rows)


def _packed(memory: Units) -> list[Packed]:
    """K and V of memory in int4."""
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
    """The format of rows on their way: the wider one, so that only one side converts."""
    formats = [getattr(torch, fmt.layout.dtype) for fmt in (one, other) if not fmt.layout.packed]
    supported: list[torch.dtype] = [dtype for dtype in formats if dtype in ROWS]
    return max(supported, key=lambda dtype: dtype.itemsize, default=torch.float32)
