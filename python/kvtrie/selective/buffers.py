"""KVCacheBuffers: where the rows of a selective cache are kept, exact or as codes.

A step writes rows, moves others, reads all of them and settles. Written rows are exact until the
step settles; from then on they are decoded from their codes. Layers that keep codes share one
working copy, into which a layer's rows are read when it did not hold the copy before.
Invariant: a row that is neither written nor moved keeps its bits; a moved row keeps its codes, so
nothing depends on which layer held the working copy. Cost: exact buffers, a scatter per step;
codes, in addition, one pass over all rows if another layer held the copy.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (torch leaves parts untyped)

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Literal

import torch

from kvtrie.errors import ClosedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["CodedBuffers", "DefaultBuffers", "KVCacheBuffers", "Place", "WorkingCopy"]

_Plane = Literal["keys", "values"]


class Place:
    """How much room a layer has: `(batch, heads, rows, dim)` in a format, on a device."""

    def __init__(
        self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        self.device = device

    def empty(self) -> torch.Tensor:
        """Numbers of this shape; zeros, so that what is hidden is finite."""
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)

    def resized(self, *, batch: int | None = None, rows: int | None = None) -> Place:
        """The same with another batch or number of rows."""
        before, heads, length, dim = self.shape
        shape = (before if batch is None else batch, heads, length if rows is None else rows, dim)
        return Place(shape, self.dtype, self.device)


class KVCacheBuffers(ABC):
    """K and V of one layer, `(batch, heads, rows, dim)` each; row numbers are int64."""

    exact = False
    """Whether what is read is what was written."""

    def __init__(self, place: Place) -> None:
        self.place = place

    @property
    @abstractmethod
    def planes(self) -> tuple[torch.Tensor, ...]:
        """All that is kept, each `(batch, heads, rows, ...)`.

        Raises:
            ClosedError: the memory was given back.
        """

    @planes.setter
    @abstractmethod
    def planes(self, planes: Sequence[torch.Tensor]) -> None: ...

    @abstractmethod
    def write(self, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Overwrite rows; until `settle` they are seen as they are given."""

    @abstractmethod
    def move(self, rows: torch.Tensor, of: torch.Tensor) -> None:
        """Overwrite rows by others of the same batch row and head, bit for bit."""

    @abstractmethod
    def seen(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the first rows, to be read before the next call."""

    @abstractmethod
    def settle(self) -> None:
        """End a step: rows it wrote are from now on what the buffers keep of them."""

    @abstractmethod
    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        """The numbers `(..., dim)` as they would be read after a write."""

    @abstractmethod
    def allocate(self) -> None:
        """Take memory of the present `place`; what was kept is forgotten."""

    @abstractmethod
    def deallocate(self) -> None:
        """Give the memory back, until `allocate`."""

    @property
    def nbytes(self) -> int:
        """Bytes that the rows take, without a working copy."""
        return sum(plane.nbytes for plane in self.planes)

    def rebuilt(self, how: Callable[[torch.Tensor], torch.Tensor], place: Place) -> None:
        """Put every plane through a function that makes one of another place."""
        self.planes = [how(plane).contiguous() for plane in self.planes]
        self.place = place


class DefaultBuffers(KVCacheBuffers):
    """K and V as they are."""

    exact = True

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._planes: tuple[torch.Tensor, ...] | None = None
        self.allocate()

    @property
    def planes(self) -> tuple[torch.Tensor, ...]:
        """K and V."""
        return _there(self._planes)

    @planes.setter
    def planes(self, planes: Sequence[torch.Tensor]) -> None:
        self._planes = tuple(planes)

    def allocate(self) -> None:
        """Take memory of the present `place`."""
        self._planes = (self.place.empty(), self.place.empty())

    def deallocate(self) -> None:
        """Give the memory back."""
        self._planes = None

    def write(self, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Overwrite rows."""
        for plane, new in zip(self.planes, (keys, values), strict=True):
            put_rows(plane, rows, new)

    def move(self, rows: torch.Tensor, of: torch.Tensor) -> None:
        """Overwrite rows by others."""
        for plane in self.planes:
            put_rows(plane, rows, take_rows(plane, of))

    def seen(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the first rows."""
        keys, values = self.planes
        return keys[:, :, :rows], values[:, :, :rows]

    def settle(self) -> None:
        """There is nothing to do: what was written is what is kept."""

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        """The numbers in the buffers' format."""
        return x.to(self.place.dtype)


class WorkingCopy:
    """K and V of the layer that was last at work, shared by the layers of a model."""

    def __init__(self) -> None:
        self.holder: object = None
        self._planes: tuple[torch.Tensor, torch.Tensor] | None = None

    def planes(self, place: Place) -> tuple[torch.Tensor, torch.Tensor]:
        """Room for a layer of this place."""
        if self._planes is None or not _fits(self._planes[0], place):
            self._planes = (place.empty(), place.empty())
            self.holder = None
        batch, _, rows, _ = place.shape
        keys, values = self._planes
        return keys[:batch, :, :rows], values[:batch, :, :rows]

    def drop(self) -> None:
        """Give the memory back."""
        self.holder = self._planes = None


class CodedBuffers(KVCacheBuffers):
    """K and V as codes, with the working copy that attention reads."""

    def __init__(self, place: Place, working: WorkingCopy) -> None:
        super().__init__(place)
        self._working = working
        self._planes: tuple[torch.Tensor, ...] | None = None
        self._fresh: torch.Tensor | None = None
        self._read = 0
        self.allocate()

    @abstractmethod
    def _room(self) -> tuple[torch.Tensor, ...]:
        """Planes of codes, scales and the like, those of K and then those of V."""

    @abstractmethod
    def _encode(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Of numbers `(..., dim)`, what the planes keep of them, of K or of V."""

    @abstractmethod
    def _decode(self, stored: Sequence[torch.Tensor]) -> torch.Tensor:
        """Numbers of what planes keep."""

    @property
    def planes(self) -> tuple[torch.Tensor, ...]:
        """Codes, scales and the like of K, then of V."""
        return _there(self._planes)

    @planes.setter
    def planes(self, planes: Sequence[torch.Tensor]) -> None:
        self._planes = tuple(planes)
        self._forget()

    def allocate(self) -> None:
        """Take memory of the present `place`."""
        self._planes = self._room()
        self._forget()

    def deallocate(self) -> None:
        """Give the memory back; the working copy is the model's."""
        self._planes = None
        self._forget()

    def write(self, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Overwrite rows: codes for good, the numbers themselves until `settle`."""
        half = len(self.planes) // 2
        for new, planes in ((keys, self.planes[:half]), (values, self.planes[half:])):
            for plane, codes in zip(planes, self._encode(new), strict=True):
                put_rows(plane, rows, codes)
        if self._working.holder is self:
            for plane, new in zip(self._working.planes(self.place), (keys, values), strict=True):
                put_rows(plane, rows, new)
        else:
            self._pending = (keys, values)
        self._fresh = rows

    def move(self, rows: torch.Tensor, of: torch.Tensor) -> None:
        """Overwrite rows by others, codes by codes."""
        for plane in self.planes:
            put_rows(plane, rows, take_rows(plane, of))
        if self._working.holder is self:
            for plane in self._working.planes(self.place):
                put_rows(plane, rows, take_rows(plane, of))

    def seen(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the first rows, from the working copy."""
        keys, values = self._working.planes(self.place)
        if self._working.holder is not self:
            half = len(self.planes) // 2
            codes = [plane[:, :, :rows] for plane in self.planes]
            keys[:, :, :rows] = self._decode(codes[:half])
            values[:, :, :rows] = self._decode(codes[half:])
            self._working.holder = self
            if self._fresh is not None and self._pending is not None:
                put_rows(keys, self._fresh, self._pending[0])
                put_rows(values, self._fresh, self._pending[1])
        self._pending = None
        return keys[:, :, :rows], values[:, :, :rows]

    def settle(self) -> None:
        """Let the working copy say of the rows just written what their codes say."""
        if self._fresh is not None and self._working.holder is self:
            half = len(self.planes) // 2
            stored = [take_rows(plane, self._fresh) for plane in self.planes]
            for plane, codes in zip(
                self._working.planes(self.place), (stored[:half], stored[half:]), strict=True
            ):
                put_rows(plane, self._fresh, self._decode(codes))
        self._fresh = self._pending = None

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        """Numbers after encoding and decoding."""
        return self._decode(self._encode(x))

    def _forget(self) -> None:
        self._fresh = None
        self._pending: tuple[torch.Tensor, torch.Tensor] | None = None
        if self._working.holder is self:
            self._working.holder = None


def put_rows(plane: torch.Tensor, rows: torch.Tensor, new: torch.Tensor) -> None:
    """Write `new` `(batch, heads, n, ...)` into rows of a plane `(batch, heads, rows, ...)`."""
    index = rows if plane.dim() == rows.dim() else rows[..., None].expand_as(new)
    plane.scatter_(2, index, new.to(plane.dtype))


def take_rows(plane: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Rows of a plane, `(batch, heads, n, ...)`."""
    if plane.dim() == rows.dim():
        return plane.gather(2, rows)
    return plane.gather(2, rows[..., None].expand(*rows.shape, plane.shape[-1]))


def _fits(plane: torch.Tensor, place: Place) -> bool:
    """Whether a working copy has room for a place."""
    batch, heads, rows, dim = place.shape
    return (
        plane.shape[0] >= batch
        and plane.shape[1] == heads
        and plane.shape[2] >= rows
        and plane.shape[3] == dim
        and plane.dtype == place.dtype
        and plane.device == place.device
    )


def _there(planes: tuple[torch.Tensor, ...] | None) -> tuple[torch.Tensor, ...]:
    if planes is None:
        raise ClosedError("the buffers gave their memory back: call allocate() first")
    return planes
