"""Connector: copies units between the first tier and the memory of a lower tier.

`PagedConnector` copies directly between slots. `BufferedConnector` also gathers a layer's match in
a contiguous buffer, in logical order. Fusion may change the buffer, while the slots keep the
stored KV.
Invariant: staging memory never exceeds its limit.
Cost: a direct copy makes a copy per run of adjacent units. A staged copy (`use_gpu`) sends whole
pieces over the link, with a gather or scatter per piece on the first tier.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from kvtrie.errors import NoSpaceError
from kvtrie.kernels import copy_rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from kvtrie.tiers import Pool

__all__ = ["BufferedConnector", "LayerBuffer", "PagedConnector"]


class LayerBuffer(NamedTuple):
    """A layer of a match in logical order. The holder may modify it.

    Attributes:
        keys: K `(tokens, kv_heads, head_dim)`.
        values: V `(tokens, kv_heads, v_head_dim)`.
    """

    keys: torch.Tensor
    values: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of K and V together."""
        return self.keys.nbytes + self.values.nbytes


class PagedConnector:
    """Copies between slots, directly or through staging buffers on the first tier's device.

    Args:
        pool: the memory of the first tier.
        use_gpu: copy through a staging buffer for loads and a staging buffer for stores.
        staging_bytes: maximum size of each staging buffer.

    Raises:
        NoSpaceError: with `use_gpu`, staging is smaller than a unit.
    """

    buffered = False

    def __init__(self, pool: Pool, *, use_gpu: bool = False, staging_bytes: int = 64 << 20) -> None:
        self.pool = pool
        self.use_gpu = use_gpu
        unit = sum(plane.shape[1] for plane in pool.planes)
        self.rows = staging_bytes // unit
        if use_gpu and not self.rows:
            raise NoSpaceError(
                f"staging of {staging_bytes} bytes holds no unit of {unit}",
                tier="staging",
                wanted=1,
                free=0,
                coming=0,
                leased=0,
            )
        self._load: tuple[torch.Tensor, ...] = ()
        self._store: tuple[torch.Tensor, ...] = ()

    def copy(
        self,
        source: Pool,
        source_units: NDArray[np.int64],
        target: Pool,
        units: NDArray[np.int64],
    ) -> None:
        """Copy units between the first tier's pool and a lower pool.

        Pools of different formats are copied directly, without staging.

        Args:
            source: the pool to read.
            source_units: int64 `(n,)`, units of the source.
            target: the pool to write.
            units: int64 `(n,)`, units of the target.
        """
        if not self.use_gpu or source.layout != target.layout:
            target.copy_from(source, source_units, units)
        elif target is self.pool:
            self._load = self._load or self._staging()
            for piece in self._pieces(len(units)):
                self._up(source, source_units[piece], units[piece])
        else:
            self._store = self._store or self._staging()
            for piece in self._pieces(len(units)):
                self._down(target, units[piece], source_units[piece])

    def release(self) -> None:
        """Free the staging buffers. The next staged copy allocates them again."""
        self._load = self._store = ()

    @property
    def staged_bytes(self) -> int:
        """Bytes of the staging buffers, allocated from the first use until `release`."""
        return sum(part.nbytes for part in (*self._load, *self._store))

    def _staging(self) -> tuple[torch.Tensor, ...]:
        device = self.pool.device
        return tuple(
            torch.empty((self.rows, plane.shape[1]), dtype=torch.uint8, device=device)
            for plane in self.pool.planes
        )

    def _pieces(self, units: int) -> Iterator[slice]:
        return (slice(at, min(at + self.rows, units)) for at in range(0, units, self.rows))

    def _up(self, below: Pool, below_units: NDArray[np.int64], units: NDArray[np.int64]) -> None:
        to = torch.from_numpy(units).to(self.pool.device)  # type: ignore[no-untyped-call]
        for plane, other, staging in zip(self.pool.planes, below.planes, self._load, strict=True):
            part = staging[: len(units)]
            copy_rows(other, below_units, part, np.arange(len(units)))
            plane.index_copy_(0, to, part)

    def _down(self, below: Pool, below_units: NDArray[np.int64], units: NDArray[np.int64]) -> None:
        of = torch.from_numpy(units).to(self.pool.device)  # type: ignore[no-untyped-call]
        for plane, other, staging in zip(self.pool.planes, below.planes, self._store, strict=True):
            part = staging[: len(units)]
            torch.index_select(plane, 0, of, out=part)
            copy_rows(part, np.arange(len(units)), other, below_units)


class BufferedConnector(PagedConnector):
    """A `PagedConnector` with a contiguous buffer of each layer's match, for fusion.

    Attributes:
        buffer_bytes_in_use: bytes of the buffers returned by `lay_out` and not yet returned to
            `take_back`.
    """

    buffered = True

    def __init__(self, pool: Pool, *, use_gpu: bool = False, staging_bytes: int = 64 << 20) -> None:
        super().__init__(pool, use_gpu=use_gpu, staging_bytes=staging_bytes)
        self.staging_bytes = staging_bytes
        self.buffer_bytes_in_use = 0

    @property
    def staged_bytes(self) -> int:
        """Bytes of the staging buffers and of the layer buffers in use."""
        return super().staged_bytes + self.buffer_bytes_in_use

    def buffer_bytes(self, tokens: int) -> int:
        """Return the bytes of a layer's buffer."""
        rows = (self.pool.keys, self.pool.values)
        return sum(tokens * row.shape[1] * row.shape[2] * row.element_size() for row in rows)

    def layers_at_once(self, tokens: int) -> int:
        """Return the number of layer buffers of a match that fit in staging together.

        Raises:
            NoSpaceError: staging is smaller than a layer's buffer.
        """
        size = self.buffer_bytes(tokens)
        if size > self.staging_bytes:
            raise NoSpaceError(
                f"a layer of {tokens} tokens is {size} bytes, staging has {self.staging_bytes}",
                tier="staging",
                wanted=1,
                free=0,
                coming=0,
                leased=0,
            )
        return self.staging_bytes // size if size else self.pool.layers + 1

    def lay_out(self, units: torch.Tensor, tokens: int) -> LayerBuffer:
        """Copy the first tokens of a layer's units into a buffer, in logical order."""
        size, device = self.pool.block_tokens, self.pool.device
        at = torch.arange(tokens, device=device)
        buffer = LayerBuffer(*self.pool.gather(units[at // size], at % size))
        self.buffer_bytes_in_use += buffer.nbytes
        return buffer

    def take_back(self, buffer: LayerBuffer) -> None:
        """Stop counting the bytes of an unused buffer."""
        self.buffer_bytes_in_use -= buffer.nbytes
