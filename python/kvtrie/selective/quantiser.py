"""Quantise: blocks of numbers as codes of 8 or 4 bits, each block with a scale and a zero point.

Invariant: codes are the same bits on every device. A block need not contain 0. Decoded numbers are
within half a scale. Cost: a few passes over the numbers, and 64 bits per block in addition to the
codes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kvtrie.errors import ConfigError

__all__ = ["BITS", "Codes", "dequantise", "quantise"]

BITS = (8, 4)
LEAST_BLOCK = 16
_LEAST_SCALE = 2.0**-23
# Zero points stay below 2^30: the scale grows for a block of large and similar numbers.
_LARGE = 2.0**7
_SHARE = 2.0**-30


class Codes(NamedTuple):
    """Blocks along the last axis.

    Attributes:
        codes: uint8 `(..., d)`, with 4 bits `(..., d / 2)`: the first half of a block in the high
            nibbles and the second half in the low nibbles.
        scale: fp32 `(..., 1)`.
        zero: int32 `(..., 1)`, the code of 0, possibly far outside of the range of codes.
        bits: 8 or 4.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor
    bits: int


def quantise(x: torch.Tensor, bits: int) -> Codes:
    """Return codes of blocks `(..., d)` of floating-point numbers, d even and at least 16.

    `scale = max((max - min) / (2^bits - 1), 2^-23)`, `zero = -round(min / scale)`, `code =
    clamp(round(x (1 / scale)) + zero, 0, 2^bits - 1)`, in fp32. Beyond 128 the smallest scale is
    2^-30 of the largest number, so zero fits into 32 bits.

    Raises:
        ConfigError: bits other than 8 and 4, or blocks of fewer than 16 or an odd number of
            numbers.
    """
    if bits not in BITS:
        raise ConfigError(f"codes have 8 or 4 bits, not {bits}")
    width = x.shape[-1] if x.dim() else 0
    if width < LEAST_BLOCK or width % 2:
        raise ConfigError(
            f"a block of {width} numbers: an even number from {LEAST_BLOCK} on wanted"
        )
    given = x.float()
    low, high = torch.aminmax(given, dim=-1, keepdim=True)
    largest = torch.maximum(low.abs(), high.abs())
    least = torch.where(largest > _LARGE, largest * _SHARE, _LEAST_SCALE)
    top = 2**bits - 1
    scale = torch.maximum((high - low) / top, least)
    zero = -torch.round(low / scale).to(torch.int32)
    codes = torch.round(given * (1 / scale)).to(torch.int32).add_(zero).clamp_(0, top)
    codes = codes.to(torch.uint8)
    if bits == 4:  # noqa: PLR2004 - two codes share a byte
        codes = (codes[..., : width // 2] << 4) | codes[..., width // 2 :]
    return Codes(codes, scale, zero, bits)


def dequantise(codes: Codes, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers `(..., d)`: `(code - zero) scale` in fp32, then rounded to `dtype`."""
    plain = codes.codes
    if codes.bits == 4:  # noqa: PLR2004 - two codes share a byte
        plain = torch.cat((plain >> 4, plain & 15), dim=-1)
    return (plain.to(torch.int32) - codes.zero).float().mul_(codes.scale).to(dtype)
