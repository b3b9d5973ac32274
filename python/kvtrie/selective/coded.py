"""Buffers of codes: quantised in plain PyTorch, or by the kernels of paged KV.

Invariant: codes of a row depend only on the row. Cost: the quantiser's cost, see `CodedBuffers`.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (torch leaves parts untyped)

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from kvtrie.errors import ConfigError
from kvtrie.kernels import Pages, Plane, gather, scatter
from kvtrie.selective.buffers import CodedBuffers, Place, WorkingCopy
from kvtrie.selective.quantiser import LEAST_BLOCK, Codes, dequantise, quantise

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["PagedBuffers", "TorchQuantized"]


class TorchQuantized(CodedBuffers):
    """Codes of 8 or 4 bits with a scale and a zero point per row, see `quantise`."""

    def __init__(self, place: Place, working: WorkingCopy, *, bits: int) -> None:
        if place.shape[3] < LEAST_BLOCK:
            raise ConfigError(
                f"heads of {place.shape[3]} numbers are too small to quantise: a block has at "
                f"least {LEAST_BLOCK}"
            )
        self._bits = bits
        super().__init__(place, working)

    def _room(self) -> tuple[torch.Tensor, ...]:
        *rows, dim = self.place.shape
        device = self.place.device
        return tuple(
            torch.zeros((*rows, width), dtype=dtype, device=device)
            for _ in range(2)
            for width, dtype in (
                (dim * self._bits // 8, torch.uint8),
                (1, torch.float32),
                (1, torch.int32),
            )
        )

    def _encode(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return quantise(x, self._bits)[:3]

    def _decode(self, stored: Sequence[torch.Tensor]) -> torch.Tensor:
        codes, scale, zero = stored
        return dequantise(Codes(codes, scale, zero, self._bits), self.place.dtype)


class PagedBuffers(CodedBuffers):
    """Codes of int8 or fp8 with a scale per row, by the kernels of paged KV.

    For the kernels a row is a token.
    """

    def __init__(
        self, place: Place, working: WorkingCopy, *, cell: Literal["int8", "float8_e4m3fn"]
    ) -> None:
        self._cell: torch.dtype = getattr(torch, cell)
        super().__init__(place, working)
        self.rounded(torch.zeros(1, place.shape[3], dtype=place.dtype, device=place.device))

    def _room(self) -> tuple[torch.Tensor, ...]:
        *rows, dim = self.place.shape
        return tuple(
            torch.zeros((*rows, width), dtype=dtype, device=self.place.device)
            for _ in range(2)
            for width, dtype in ((dim, torch.uint8), (1, torch.float32))
        )

    def _pages(self, codes: torch.Tensor, scales: torch.Tensor) -> Pages:
        # One block with a token per row: rows are contiguous for the kernel.
        cells = codes.view(self._cell).view(1, -1, 1, codes.shape[-1])
        plane = Plane(cells, scales.view(1, -1, 1))
        return Pages((plane,), "group")

    def _encode(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = x.reshape(-1, 1, x.shape[-1])
        codes = torch.empty((len(rows), x.shape[-1]), dtype=torch.uint8, device=x.device)
        scales = torch.empty((len(rows), 1), device=x.device)
        slots = torch.arange(len(rows), device=x.device)
        scatter(self._pages(codes, scales), slots, rows)
        return codes.view(x.shape), scales.view(*x.shape[:-1], 1)

    def _decode(self, stored: Sequence[torch.Tensor]) -> torch.Tensor:
        codes, scales = (each.contiguous() for each in stored)
        rows = torch.empty(
            (scales.numel(), 1, codes.shape[-1]), dtype=self.place.dtype, device=codes.device
        )
        pages = self._pages(codes.view(-1, codes.shape[-1]), scales.view(-1, 1))
        gather(pages, torch.arange(len(rows), device=codes.device), rows)
        return rows.view(codes.shape)
