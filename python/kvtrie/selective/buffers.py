"""KVCacheBuffers: storage of the rows of a selective cache, exact or quantised.

A step writes rows, moves rows, reads all rows and ends. Written rows are exact until the step
ends, and later decoded from their codes. Layers with codes share a working copy for attention. A
layer decodes its rows into the copy unless it was the last user.
Invariant: writes and moves change no further rows. A moved row keeps its codes, so results do not
depend on the holder of the working copy. Cost: a scatter per step. Codes add a pass over all rows
when the working copy changes its holder.
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
    """Size of a layer's buffers: `(batch, heads, rows, dim)` in a format, on a device."""

    def __init__(
        self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        self.device = device

    def empty(self) -> torch.Tensor:
        """Return zeros of this shape. Hidden rows have to be finite."""
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)

    def resized(self, *, batch: int | None = None, rows: int | None = None) -> Place:
        """Return a place with a new batch or number of rows."""
        before, heads, length, dim = self.shape
        shape = (before if batch is None else batch, heads, length if rows is None else rows, dim)
        return Place(shape, self.dtype, self.device)


class KVCacheBuffers(ABC):
    """K and V of a layer, `(batch, heads, rows, dim)` each. Row numbers are int64."""

    exact = False
    """Whether rows are read exactly as written."""

    def __init__(self, place: Place) -> None:
        self.place = place

    @property
    @abstractmethod
    def planes(self) -> tuple[torch.Tensor, ...]:
        """All stored tensors, each `(batch, heads, rows, ...)`.

        Raises:
            ClosedError: the memory was released.
        """

    @planes.setter
    @abstractmethod
    def planes(self, planes: Sequence[torch.Tensor]) -> None: ...

    @abstractmethod
    def write(self, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Overwrite rows. Until `end_step`, reads return the exact numbers."""

    @abstractmethod
    def move(self, rows: torch.Tensor, of: torch.Tensor) -> None:
        """Copy rows `of` to `rows` within a batch row and head, bit for bit."""

    @abstractmethod
    def seen(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of the first rows, valid until the next call."""

    @abstractmethod
    def end_step(self) -> None:
        """End a step: from now on its rows are read as stored."""

    @abstractmethod
    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        """Return the numbers `(..., dim)` as read after a write and `end_step`."""

    @abstractmethod
    def allocate(self) -> None:
        """Allocate memory for the current `place` and forget all rows."""

    @abstractmethod
    def deallocate(self) -> None:
        """Release the memory until `allocate`."""

    @property
    def nbytes(self) -> int:
        """Bytes of the rows, without a working copy."""
        return sum(plane.nbytes for plane in self.planes)

    def rebuilt(self, how: Callable[[torch.Tensor], torch.Tensor], place: Place) -> None:
        """Replace every plane by its result of a function, with a new place."""
        self.planes = [how(plane).contiguous() for plane in self.planes]
        self.place = place


class DefaultBuffers(KVCacheBuffers):
    """Exact K and V."""

    exact = True

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._planes: tuple[torch.Tensor, ...] | None = None
        self.allocate()

    @property
    def planes(self) -> tuple[torch.Tensor, ...]:
        """K and V, `(batch, heads, rows, dim)` each."""
        return _allocated(self._planes)

    @planes.setter
    def planes(self, planes: Sequence[torch.Tensor]) -> None:
        self._planes = tuple(planes)

    def allocate(self) -> None:
        """Allocate memory for the current `place`."""
        self._planes = (self.place.empty(), self.place.empty())

    def deallocate(self) -> None:
        """Release the memory."""
        self._planes = None

    def write(self, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Overwrite rows."""
        for plane, new in zip(self.planes, (keys, values), strict=True):
            put_rows(plane, rows, new)

    def move(self, rows: torch.Tensor, of: torch.Tensor) -> None:
        """Copy rows `of` to `rows`."""
        for plane in self.planes:
            put_rows(plane, rows, take_rows(plane, of))

    def seen(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of the first rows."""
        keys, values = self.planes
        return keys[:, :, :rows], values[:, :, :rows]

    def end_step(self) -> None:
        """Do nothing: rows are stored exactly."""

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        """Return the numbers in the buffers' format."""
        return x.to(self.place.dtype)


class WorkingCopy:
    """Decoded K and V of the last active layer, shared by the layers of a model."""

    def __init__(self) -> None:
        self.holder: object = None
        self._planes: tuple[torch.Tensor, torch.Tensor] | None = None

    def planes(self, place: Place) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V tensors for a layer of this place."""
        if self._planes is None or not _fits(self._planes[0], place):
            self._planes = (place.empty(), place.empty())
            self.holder = None
        batch, _, rows, _ = place.shape
        keys, values = self._planes
        return keys[:batch, :, :rows], values[:batch, :, :rows]

    def drop(self) -> None:
        """Release the memory."""
        self.holder = self._planes = None


class CodedBuffers(KVCacheBuffers):
    """K and V as codes, with a decoded working copy for attention."""

    def __init__(self, place: Place, working: WorkingCopy) -> None:
        super().__init__(place)
        self._working = working
        self._planes: tuple[torch.Tensor, ...] | None = None
        self._fresh: torch.Tensor | None = None
        self._read = 0
        self.allocate()

    @abstractmethod
    def _room(self) -> tuple[torch.Tensor, ...]:
        """Return planes of codes, scales and further data, of K and then of V."""

    @abstractmethod
    def _encode(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the contents of the planes for numbers `(..., dim)` of K or V."""

    @abstractmethod
    def _decode(self, stored: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the numbers decoded from the contents of the planes."""

    @property
    def planes(self) -> tuple[torch.Tensor, ...]:
        """Codes, scales and further data of K, then of V."""
        return _allocated(self._planes)

    @planes.setter
    def planes(self, planes: Sequence[torch.Tensor]) -> None:
        self._planes = tuple(planes)
        self._forget()

    def allocate(self) -> None:
        """Allocate memory for the current `place`."""
        self._planes = self._room()
        self._forget()

    def deallocate(self) -> None:
        """Release the memory. The working copy belongs to the model."""
        self._planes = None
        self._forget()

    def write(self, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Overwrite codes of rows, and their exact numbers until `end_step`."""
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
        """Copy rows `of` to `rows`, codes by codes."""
        for plane in self.planes:
            put_rows(plane, rows, take_rows(plane, of))
        if self._working.holder is self:
            for plane in self._working.planes(self.place):
                put_rows(plane, rows, take_rows(plane, of))

    def seen(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of the first rows, from the working copy."""
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

    def end_step(self) -> None:
        """Replace the new rows of the working copy by their decoded codes."""
        if self._fresh is not None and self._working.holder is self:
            half = len(self.planes) // 2
            stored = [take_rows(plane, self._fresh) for plane in self.planes]
            for plane, codes in zip(
                self._working.planes(self.place), (stored[:half], stored[half:]), strict=True
            ):
                put_rows(plane, self._fresh, self._decode(codes))
        self._fresh = self._pending = None

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        """Return the numbers after encoding and decoding."""
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
    """Return rows of a plane, `(batch, heads, n, ...)`."""
    if plane.dim() == rows.dim():
        return plane.gather(2, rows)
    return plane.gather(2, rows[..., None].expand(*rows.shape, plane.shape[-1]))


def _fits(plane: torch.Tensor, place: Place) -> bool:
    """Return whether a working copy has room for a place."""
    batch, heads, rows, dim = place.shape
    return (
        plane.shape[0] >= batch
        and plane.shape[1] == heads
        and plane.shape[2] >= rows
        and plane.shape[3] == dim
        and plane.dtype == place.dtype
        and plane.device == place.device
    )


def _allocated(planes: tuple[torch.Tensor, ...] | None) -> tuple[torch.Tensor, ...]:
    if planes is None:
        raise ClosedError("the buffers gave their memory back: call allocate() first")
    return planes
