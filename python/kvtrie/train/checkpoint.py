"""Checkpoint: numbers in host memory or in files, exact or quantised.

Invariant: numbers are read back to their device, in their format, bit for bit unless quantised.
Cost: a copy in each direction, overlapped with the computation, and a pass over quantised numbers.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (torch leaves parts untyped)

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtrie.errors import ConfigError
from kvtrie.selective.quantiser import LEAST_BLOCK, Codes, dequantise, quantise
from kvtrie.train.settings import QUANTISERS

if TYPE_CHECKING:
    import torch

    from kvtrie.train.host_pool import HostPool
    from kvtrie.train.spill import Spill

__all__ = ["Checkpoint", "block_of", "coded_bytes"]

_BLOCK = 128
_SCALE_BYTES = 8  # bytes of a block's scale and zero point


class Checkpoint:
    """Numbers of a forward pass, kept for the backward pass.

    Args:
        x: floating-point numbers in their final state.
        pool: the host memory for the copy.
        quantiser: name of a quantiser. None keeps exact numbers.
        spill: files for the copy. None keeps it in memory.
    """

    __slots__ = ("_bits", "_dtype", "_parts", "_shape")

    def __init__(
        self,
        x: torch.Tensor,
        pool: HostPool,
        quantiser: str | None = None,
        spill: Spill | None = None,
    ) -> None:
        self._dtype, self._shape = x.dtype, x.shape
        self._bits = 0 if quantiser is None else QUANTISERS[quantiser]
        parts = (x,)
        if self._bits:
            parts = quantise(x.unflatten(-1, (-1, block_of(x.shape[-1]))), self._bits)[:3]
        self._parts = [pool.put(each, spill) for each in parts]

    def bring(self) -> None:
        """Start copying back to the device, in parallel with the computation."""
        for each in self._parts:
            each.bring()

    def read(self) -> torch.Tensor:
        """Return the numbers, on their original device."""
        self.bring()
        planes = [each.read() for each in self._parts]
        if not self._bits:
            return planes[0]
        return dequantise(Codes._make((*planes, self._bits)), self._dtype).view(self._shape)

    def free(self) -> None:
        """Release the memory to the pool."""
        for each in self._parts:
            each.free()

    @property
    def nbytes(self) -> int:
        """Bytes in host memory."""
        return sum(each.nbytes for each in self._parts)


def block_of(width: int) -> int:
    """Return the size of a quantised block: the largest even divisor of the width up to 128.

    Raises:
        ConfigError: no even number from 16 to 128 divides the width.
    """
    for block in range(min(_BLOCK, width), LEAST_BLOCK - 1, -1):
        if width % block == 0 and block % 2 == 0:
            return block
    raise ConfigError(
        f"checkpoints {width} wide cannot be quantised: no even number from {LEAST_BLOCK} to "
        f"{_BLOCK} divides that"
    )


def coded_bytes(numbers: int, width: int, itemsize: int, quantiser: str | None) -> int:
    """Return the bytes of numbers in host memory.

    Args:
        numbers: count of the numbers.
        width: length of their last axis.
        itemsize: bytes of an exact number.
        quantiser: name of a quantiser. None keeps exact numbers.
    """
    if quantiser is None:
        return numbers * itemsize
    return numbers * QUANTISERS[quantiser] // 8 + numbers // block_of(width) * _SCALE_BYTES
