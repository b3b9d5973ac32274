"""Narrowed and Alike: convert blocks in host memory to the format of a disk.

Invariant: a different format must have fewer bits, so a disk never keeps more bytes than the memory
above it.
Cost: nothing for equal formats with memory on the host. Otherwise per block a buffer of its bytes
on disk, and a copy or conversion each way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvtrie.errors import ConfigError
from kvtrie.model.layout import DTYPE_BYTES
from kvtrie.tiers import conversion
from kvtrie.tiers.block_format import FORMAT
from kvtrie.tiers.conversion import Dense

if TYPE_CHECKING:
    from kvtrie.tiers.block_format import BlockFormat

__all__ = ["Alike", "Narrowed", "require_narrower"]

_INT4_BITS = 4


def require_narrower(above: str, wanted: BlockFormat, name: str, own: BlockFormat) -> None:
    """Raise unless a disk can keep KV of the memory above it in its own format.

    Args:
        above: the memory's name.
        wanted: its format.
        name: the disk's name.
        own: its format.

    Raises:
        ConfigError: formats differ in more than the numbers, the disk's numbers have no fewer bits,
            or KV cannot be converted.
    """
    differ = f"{above} and {name} differ: {', '.join(wanted.differences(own))}"
    if wanted.differences(own, but=FORMAT):
        raise ConfigError(differ)
    if len(own.planes()) != 1:
        raise ConfigError(
            f"{differ}; K and V of a layer are apart, and a disk converts joined ones: use "
            "Layout(kv='joined')"
        )
    bits = [
        _INT4_BITS if one.layout.packed else 8 * DTYPE_BYTES[one.layout.dtype]
        for one in (wanted, own)
    ]
    if bits[1] >= bits[0]:
        raise ConfigError(
            f"{differ}; a number takes {bits[0]} and {bits[1]} bits, and a disk may have another "
            "format than the memory above it only where it takes fewer"
        )
    try:
        conversion.check(wanted, own)
    except ConfigError as error:
        raise ConfigError(f"{above} and {name} cannot exchange KV: {error}") from error


class Alike:
    """Blocks with the same format on disk and in memory."""

    def buffer(self, memory: torch.Tensor) -> torch.Tensor:
        """Return host memory for the bytes of a memory region."""
        return memory if memory.device.type == "cpu" else torch.empty_like(memory, device="cpu")

    def narrow(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the bytes of a memory region, on the host."""
        return memory.cpu()

    def widen(self, stored: torch.Tensor, memory: torch.Tensor) -> None:
        """Copy the bytes of a `buffer` into its memory region."""
        if stored is not memory:
            memory.copy_(stored)


@dataclass(frozen=True, slots=True)
class Narrowed:
    """The conversion between memory and a disk.

    Attributes:
        above: format of the memory.
        own: format of the disk.
    """

    above: BlockFormat
    own: BlockFormat

    def buffer(self, memory: torch.Tensor) -> torch.Tensor:
        """Return zeroed host memory for the same number of layers in the disk's format."""
        return torch.zeros((len(memory), self.own.unit_bytes), dtype=torch.uint8)

    def narrow(self, memory: torch.Tensor) -> torch.Tensor:
        """Return layers of a block in the disk's format, on the host.

        Args:
            memory: uint8 `(layers, bytes of one layer above)`, on any device.
        """
        made, units = self.buffer(memory), np.arange(len(memory))
        conversion.convert(Dense(self.above, (memory,)), units, Dense(self.own, (made,)), units)
        return made

    def widen(self, stored: torch.Tensor, memory: torch.Tensor) -> None:
        """Write layers in the disk's format into memory.

        Args:
            stored: memory returned by `narrow` or `buffer`.
            memory: uint8 `(layers, bytes of one layer above)`, on any device.
        """
        units = np.arange(len(memory))
        conversion.convert(Dense(self.own, (stored,)), units, Dense(self.above, (memory,)), units)
