"""Conversion: units copied between pools that keep KV in different formats.

Tokens go through rows in a format that at least one of the two understands by itself: what is
narrowed is rounded once, what keeps its format keeps its bits. It runs where the device is
(`gather` and `scatter` of `kvtrie.kernels`, their twins where there is none), so that the link
carries the bytes of the lower tier's format.
Invariant: whatever cannot be converted is refused before any memory is taken. Cost: one launch each
way per piece; beside the pools at most `PIECE_BYTES` of rows, and as many units.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from kvtrie.errors import ConfigError
from kvtrie.kernels import Pages, copy_rows, gather, scatter
from kvtrie.kernels.checks import check_plane, vector
from kvtrie.kernels.formats import ROWS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvtrie.tiers.form import Form
    from kvtrie.tiers.pool import Pool

__all__ = ["PIECE_BYTES", "check", "convert", "pages"]

PIECE_BYTES = 8 << 20
"""Rows that are under way at once."""


def pages(form: Form, memory: Sequence[torch.Tensor], units: int) -> Pages:
    """All units of some memory as blocks of one layer: a token of any layer has a slot."""
    return Pages.of(
        memory,
        form.layout,
        blocks=units,
        block_tokens=form.block_tokens,
        heads=form.heads,
        head_dim=form.head_dim,
        v_head_dim=form.v_head_dim,
    )


def check(one: Form, other: Form) -> None:
    """Look whether KV can go from one form to another and back.

    Raises:
        ConfigError: a format that kernels do not know, scales that would have to be given, heads
            that kernels cannot serve.
    """
    step = vector(_between(one, other))
    for form in (one, other):
        if form.layout.scales in {"tensor", "head"}:
            raise ConfigError(
                f"scales by {form.layout.scales!r} would have to be given; a tier finds those of "
                "each 'token' or 'group'"
            )
        shapes = [torch.empty(size, dtype=torch.uint8, device="meta") for size in form.planes()]
        found = pages(form, shapes, 1)
        for plane in found.planes:
            check_plane(plane, found.covers, step)


def convert(
    source: Pool, source_units: NDArray[np.int64], target: Pool, units: NDArray[np.int64]
) -> None:
    """Copy whole units from pool to pool, each in its format; on a GPU without waiting for it.

    Args:
        source: where from.
        source_units: int64 `(n,)`.
        target: where to.
        units: int64 `(n,)`, all different.
    """
    form = source.form
    device = source.device if source.device.type == "cuda" else target.device
    between = _between(form, target.form)
    widths = (form.head_dim, *(() if form.layout.latent else (form.v_head_dim,)))
    size = form.block_tokens * form.heads * sum(widths) * between.itemsize
    most = min(len(units), max(1, PIECE_BYTES // size))
    rows = [
        torch.empty((most * form.block_tokens, form.heads, dim), dtype=between, device=device)
        for dim in widths
    ]
    for first in range(0, len(units), most):
        piece = slice(first, first + most)
        here, there = source_units[piece], units[piece]
        part = [each[: len(there) * form.block_tokens] for each in rows]
        _read(source, here, part, device)
        _write(target, there, part, device)


def _read(
    pool: Pool, units: NDArray[np.int64], rows: Sequence[torch.Tensor], device: torch.device
) -> None:
    if pool.device == device:
        gather(pool.pages, _slots(pool.form, units), *rows)
        return
    staging = _staging(pool, len(units), device)
    near = np.arange(len(units))
    for plane, part in zip(pool.planes, staging, strict=True):
        copy_rows(plane, units, part, near)
    gather(pages(pool.form, staging, len(units)), _slots(pool.form, near), *rows)


def _write(
    pool: Pool, units: NDArray[np.int64], rows: Sequence[torch.Tensor], device: torch.device
) -> None:
    if pool.device == device:
        scatter(pool.pages, _slots(pool.form, units), *rows)
        return
    staging = _staging(pool, len(units), device)
    near = np.arange(len(units))
    scatter(pages(pool.form, staging, len(units)), _slots(pool.form, near), *rows)
    for plane, part in zip(pool.planes, staging, strict=True):
        copy_rows(part, near, plane, units)


def _staging(pool: Pool, units: int, device: torch.device) -> list[torch.Tensor]:
    """Units beside the device; padding stays zero."""
    return [
        torch.zeros((units, plane.shape[1]), dtype=torch.uint8, device=device)
        for plane in pool.planes
    ]


def _slots(form: Form, units: NDArray[np.int64]) -> torch.Tensor:
    within = torch.arange(form.block_tokens)
    return (torch.as_tensor(units)[:, None] * form.block_tokens + within).view(-1)


def _between(one: Form, other: Form) -> torch.dtype:
    """The format of rows on their way: the wider one, so that only one side converts."""
    formats: list[torch.dtype] = [getattr(torch, form.layout.dtype) for form in (one, other)]
    known = [dtype for dtype in formats if dtype in ROWS]
    return max(known, key=lambda dtype: dtype.itemsize, default=torch.float32)
