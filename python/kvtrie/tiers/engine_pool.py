"""EnginePool: KV memory owned by an engine, divided into units like a `Pool`.

The engine has a tensor per layer, or separate K and V tensors, with any position of the block axis
and any strides. A unit is a layer of a block as plain bytes: the concatenated bytes of its tensors,
each in the order of its other axes. If only the engine knows their meaning, the pool is *opaque*:
its bytes are copied unchanged, and no tier below uses a different format. If the engine's blocks
hold fewer tokens, a slot consists of several engine blocks, its *pages*, consecutive for each
tensor. A model with separate groups of layers has a pool per group, and the first group's pool is
the tier's.
Invariant: no memory is allocated, and only blocks named by moves are written.
Cost: a gather and a scatter per layer and tensor. If a block's bytes are contiguous, a copy per run
of adjacent blocks.
"""

# pyright: reportUnknownMemberType=false
# (torch leaves `from_numpy` untyped)

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from kvtrie.errors import ConfigError
from kvtrie.kernels import copy_rows
from kvtrie.model.layout import Layout
from kvtrie.tiers.block_format import FORMAT
from kvtrie.tiers.conversion import PIECE_BYTES
from kvtrie.tiers.group_slots import GroupSlots
from kvtrie.tiers.pool import Pool

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Self

    from numpy.typing import NDArray

    from kvtrie.model.shape import ModelShape

__all__ = ["EnginePool"]


class EnginePool(Pool):
    """The memory of a tier with `owner="engine"`, for `Runner` and `Executor`.

    Args:
        model: the shape of the model.
        block_tokens: tokens per block.
        tensors: the tensor of each layer, or its K and V tensors.
        block_axis: the axis of blocks, the same in all tensors.
        opaque: the engine's name of a block's layout, if only the block axis has a meaning outside
            the engine. Empty for K and then V, ordered by token, head and number.
        pages: engine blocks per slot. Above 1, `set_pages` sets them.
        group: the number of the tensors' layer group, or None for all layers.
        rest: the pool of the groups after it.

    Raises:
        ConfigError: the tensors do not match each other or the model.
    """

    def __init__(
        self,
        model: ModelShape,
        block_tokens: int,
        tensors: Sequence[torch.Tensor | Sequence[torch.Tensor]],
        *,
        block_axis: int = 0,
        opaque: str = "",
        pages: int = 1,
        group: int | None = None,
        rest: Self | None = None,
    ) -> None:
        layers = model.layers if group is None else len(model.groups[group].layers)
        if len(tensors) != layers:
            raise ConfigError(f"{len(tensors)} layers of tensors for {layers} of the model")
        self._parts = [
            [
                _blocks_first(part, block_axis, layer)
                for part in ([each] if isinstance(each, torch.Tensor) else each)
            ]
            for layer, each in enumerate(tensors)
        ]
        rooms = sorted({len(part) for parts in self._parts for part in parts})
        if len(rooms) != 1 or not rooms[0]:
            raise ConfigError(f"tensors of {rooms} blocks: one number above 0 wanted for all")
        layout = Layout(dtype=model.dtype, latent=model.latent, opaque=opaque)
        slots = None
        if group is not None:
            slots = GroupSlots.of_engine(model, group, rooms[0], block_tokens)
        super().__init__(model, rooms[0], block_tokens, layout=layout, slots=slots, rest=rest)
        self._pages = np.zeros((rooms[0] if pages > 1 else 0, pages), dtype=np.int64)
        wanted, devices = self.unit_bytes, set[torch.device]()
        for layer, parts in enumerate(self._parts):
            found = pages * sum(_row_bytes(part) for part in parts)
            if found != wanted:
                raise ConfigError(
                    f"a block of layer {layer} is {found} bytes in the engine's tensors and "
                    f"{wanted} by the model's shape ({model.identity().strip()})"
                )
            devices |= {part.device for part in parts}
        if len(devices) != 1:
            raise ConfigError(f"tensors on several devices: {sorted(map(str, devices))}")
        self._rows = [[_as_rows(part) for part in parts] for parts in self._parts]
        self._model = model
        self._device = devices.pop()

    def _take(self, *_: object, **__: object) -> tuple[torch.Tensor, ...]:
        """Return no planes, because the engine owns the memory."""
        return ()

    @property
    def device(self) -> torch.device:
        """The device of the engine's tensors."""
        return self._device

    def set_pages(self, pages: Mapping[int, Sequence[int]]) -> None:
        """Set the pages of slots, in the order of their tokens, with 0 for an unwritten page."""
        for slot, blocks in pages.items():
            self._pages[slot] = blocks

    def copy_from(
        self, source: Pool, source_units: NDArray[np.int64], units: NDArray[np.int64]
    ) -> None:
        """Copy units of a pool with joined K and V into the engine's tensors, see `Pool.copy_from`.

        Raises:
            ConfigError: the source is an engine pool, or differs in more than the number format.
        """
        self._require(source)
        if source.layout != self.layout:
            for piece, dense in self._dense(len(units)):
                dense.copy_from(source, source_units[piece], np.arange(len(units[piece])))
                self.copy_from(dense, np.arange(len(units[piece])), units[piece])
            return
        (plane,) = source.planes
        if not source.slots.even:
            plane, source_units = source.lifted(source_units), np.arange(len(units))
        for layer, rows in self._by_layer(units):
            self._fill(layer, units[rows] // self.layers, plane, source_units[rows])

    def copy_into(
        self, units: NDArray[np.int64], target: Pool, target_units: NDArray[np.int64]
    ) -> None:
        """Copy units into a pool with joined K and V of the same layout, see `Pool.copy_into`.

        Raises:
            ConfigError: the target is an engine pool, or differs in more than the number format.
        """
        self._require(target)
        (plane,), plane_units = target.planes, target_units
        if not target.slots.even:
            plane = torch.empty(
                (len(units), self.unit_bytes), dtype=torch.uint8, device=self.device
            )
            plane_units = np.arange(len(units))
        for layer, rows in self._by_layer(units):
            self._drain(layer, units[rows] // self.layers, plane, plane_units[rows])
        if not target.slots.even:
            target.lower(target_units, plane)

    def convert_into(
        self, units: NDArray[np.int64], target: Pool, target_units: NDArray[np.int64]
    ) -> None:
        """Copy units in pieces through dense memory, see `Pool.convert_into`.

        Raises:
            ConfigError: the target is an engine pool, or differs in more than the number format.
        """
        self._require(target)
        for piece, dense in self._dense(len(units)):
            dense_units = np.arange(len(units[piece]))
            self.copy_into(units[piece], dense, dense_units)
            target.copy_from(dense, dense_units, target_units[piece])

    def _require(self, other: Pool) -> None:
        if isinstance(other, EnginePool) or len(other.planes) != 1:
            raise ConfigError(
                "an engine's tensors exchange blocks with a pool of joined K and V only"
            )
        if differences := self.block_format.differences(other.block_format, but=FORMAT):
            raise ConfigError(f"an engine's tensors and a pool differ: {', '.join(differences)}")

    def _dense(self, units: int) -> Iterator[tuple[slice, Pool]]:
        """Yield pieces of `units` units, each with dense memory in the engine's format."""
        most = max(1, PIECE_BYTES // self.unit_bytes)
        blocks = -(-min(units, most) // self.layers)
        slots = None
        if self.slots.group is not None:
            group = self.slots.group
            slots = GroupSlots.of_engine(self._model, group, blocks, self.block_tokens)
        dense = Pool(
            self._model,
            blocks,
            self.block_tokens,
            layout=self.layout,
            device=self.device,
            slots=slots,
        )
        for first in range(0, units, most):
            yield slice(first, min(first + most, units)), dense

    def _by_layer(self, units: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.intp]]]:
        """Yield each layer with its rows of `units`."""
        layers = units % self.layers
        for layer in np.unique(layers).tolist():
            yield layer, np.flatnonzero(layers == layer)

    def _columns(self, layer: int, plane: torch.Tensor) -> Iterator[_Column]:
        """Yield a layer's tensors and pages with their places in a plane."""
        first = 0
        for part, rows in zip(self._parts[layer], self._rows[layer], strict=True):
            size = _row_bytes(part)
            for page in range(self._pages.shape[1]):
                yield _Column(part, rows, page, plane[:, first : first + size])
                first += size

    def _fill(
        self, layer: int, slots: NDArray[np.int64], plane: torch.Tensor, units: NDArray[np.int64]
    ) -> None:
        blocks = self._blocks_of(slots)
        for part, rows, page, column in self._columns(layer, plane):
            page_blocks, page_units = blocks[page], units
            if len(self._pages) and not page_blocks.all():
                page_blocks, page_units = page_blocks[page_blocks > 0], units[page_blocks > 0]
            if rows is not None:
                copy_rows(column, page_units, rows, page_blocks)
                continue
            got = column.index_select(0, torch.from_numpy(page_units).to(plane.device))
            values = got.to(part.device).view(part.dtype).view(len(page_blocks), *part.shape[1:])
            part.index_copy_(0, torch.from_numpy(page_blocks).to(part.device), values)

    def _drain(
        self, layer: int, slots: NDArray[np.int64], plane: torch.Tensor, units: NDArray[np.int64]
    ) -> None:
        blocks = self._blocks_of(slots)
        if len(self._pages) and not blocks.all():
            raise ConfigError(f"slots {slots[~blocks.all(axis=0)]} lack pages that a store reads")
        for part, rows, page, column in self._columns(layer, plane):
            if rows is not None:
                copy_rows(rows, blocks[page], column, units)
                continue
            got = part.index_select(0, torch.from_numpy(blocks[page]).to(part.device))
            values = got.reshape(len(slots), -1).view(torch.uint8).to(plane.device)
            column.index_copy_(0, torch.from_numpy(units).to(plane.device), values)

    def _blocks_of(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the engine's blocks of slots, int64 `(pages, slots)`."""
        return np.ascontiguousarray(self._pages[slots].T) if len(self._pages) else slots[None]


class _Column(NamedTuple):
    """A page of a layer's tensor in a plane.

    Attributes:
        part: the tensor, blocks first.
        rows: its blocks as rows of bytes, or None if a block is not contiguous.
        page: the number of the page.
        bytes: uint8 `(units, bytes of the page)`, in the plane.
    """

    part: torch.Tensor
    rows: torch.Tensor | None
    page: int
    bytes: torch.Tensor


def _blocks_first(part: torch.Tensor, axis: int, layer: int) -> torch.Tensor:
    if not -part.dim() <= axis < part.dim() or part.dim() < 2:  # noqa: PLR2004 - blocks and bytes
        raise ConfigError(
            f"a tensor of layer {layer} has shape {tuple(part.shape)}, which has no axis {axis} "
            "of blocks and a second axis"
        )
    return part.detach().movedim(axis, 0)


def _row_bytes(part: torch.Tensor) -> int:
    return part[0].numel() * part.element_size()


def _as_rows(part: torch.Tensor) -> torch.Tensor | None:
    """Return a view of the blocks as rows of bytes, or None if a block is not contiguous."""
    if not part[0].is_contiguous():
        return None
    size, item = _row_bytes(part), part.element_size()
    flat = part.as_strided((len(part), size // item), (part.stride(0), 1))
    return flat.view(torch.uint8)
