"""Pages: layers of a pool as tensors, addressed by slot in kernels and twins.

A slot is a token's place: `block * block_tokens + token of the block`.
Invariant: pages are views. The `Layout` gives the place of each byte of the pool. Cost: no copy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch

from kvtrie.errors import ConfigError
from kvtrie.model.layout import DTYPE_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    from kvtrie.model.layout import Axis, Layout

__all__ = ["FRESH", "Covers", "Pages", "Plane"]

Covers: TypeAlias = Literal["none", "tensor", "head", "token", "group"]

FRESH: tuple[Covers, ...] = ("token", "group")
"""Coverage of scales computed with each write. All remaining scales are given and fixed."""

_INSIDE: set[Axis] = {"kv", "token", "head", "dim"}
_AXES: tuple[Axis, ...] = ("block", "token", "head", "dim")
_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True, eq=False)
class Plane:
    """K, V or latent vectors of a layer of a pool, or of several layers.

    Attributes:
        cells: `(blocks, block_tokens, heads, dim)`, with the strides of the layout. For several
            layers `(layers, blocks, block_tokens, heads, dim)`.
        scales: fp32 value of a code step, in the cells' shape without `dim`. Heads, tokens or
            blocks with a shared scale have stride 0. None for plain numbers.
    """

    cells: torch.Tensor
    scales: torch.Tensor | None = None

    @property
    def capacity(self) -> int:
        """Number of slots, one per token with all its layers."""
        return self.cells.shape[-4] * self.cells.shape[-3]


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Pages:
    """A layer of a pool, or several layers at a constant distance.

    Attributes:
        planes: K and V, or only the latent vectors.
        covers: coverage of a scale, as in `Layout.scales`. Scales of "tensor" and "head" are given
            and fixed. Scales of "token" (all heads of a token) and "group" (a head of a token) are
            computed with each write of the token.
        rotated: whether keys carry their position's rotation.
    """

    planes: tuple[Plane, ...]
    covers: Covers = "none"
    rotated: bool = True

    @classmethod
    def of(
        cls,
        memory: Sequence[torch.Tensor],
        layout: Layout,
        *,
        blocks: int,
        block_tokens: int,
        heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        layers: int = 1,
        layer: int | tuple[int, int] = 0,
        scales: Sequence[torch.Tensor] = (),
    ) -> Self:
        """Return the pages of a layer, or of a range of layers, in a pool's memory.

        Args:
            memory: the pool's bytes, contiguous uint8: a tensor, or separate tensors of K and V if
                the layout splits them (`Pool.planes`).
            layout: the place of each number in it.
            blocks: blocks (with layer slots: units, and `layers` is 1).
            block_tokens: tokens per block, any number.
            heads: heads of K and V on this rank.
            head_dim: numbers per head of K, or of the latent vector.
            v_head_dim: numbers per head of V, by default `head_dim`.
            layers: layers in a block.
            layer: index of the layer, or `(lo, hi)` for a range. Verbs process a range as a whole,
                with rows `(hi - lo, n, heads, dim)`.
            scales: for a quantised layout, a tensor per plane: `(1,)` for "tensor", `(heads,)` for
                "head", `(blocks, block_tokens)` for "token" and `(blocks, block_tokens, heads)` for
                "group". A range of layers adds a first axis. By default, scales of "token" and
                "group" are in the pool after the numbers, in the room reserved by `Layout.planes`.

        Raises:
            ConfigError: sizes not supported by the layout, or too little memory.
        """
        lo, hi = (layer, layer + 1) if isinstance(layer, int) else layer
        if not 0 <= lo < hi <= layers or min(blocks, block_tokens, heads, head_dim) < 1:
            raise ConfigError(
                f"layer {layer} of {layers} in {blocks} blocks of {block_tokens} tokens, {heads} "
                f"heads of {head_dim} cannot be"
            )
        covers = layout.scales
        if covers == "channel":
            raise ConfigError("blocks in int4 are packed as a whole and have no pages")
        sizes = layout.planes(block_tokens, heads, head_dim, v_head_dim)
        if len(memory) != len(sizes):
            raise ConfigError(f"the layout takes {len(sizes)} tensors, {len(memory)} given")
        joined = layout.kv == "joined" and not layout.latent
        cells: list[torch.Tensor] = []
        found_scales: list[torch.Tensor] = []
        found = covers in FRESH and not scales
        for plane in range(1 if layout.latent else 2):
            at = 0 if joined else plane
            dim = (v_head_dim or head_dim) if plane else head_dim
            shape: dict[Axis, int] = {
                "block": blocks,
                "layer": hi - lo,
                "kv": 2 if joined else 1,
                "token": block_tokens,
                "head": heads,
                "dim": dim,
            }
            start: dict[Axis, int] = {"layer": lo, "kv": plane if joined else 0}
            whole: dict[Axis, int] = {**shape, "layer": layers}
            strides = _strides(layout, whole, sizes[at])
            cells.append(_cells(memory[at], layout, shape, start, strides))
            if found:
                found_scales.append(_scales_after_cells(memory[at], layout, shape, start, strides))
        given = [_spread(each, cells[at], covers) for at, each in enumerate(scales)] or found_scales
        if len(given) != (0 if covers == "none" else len(cells)):
            raise ConfigError(
                f"scales by {covers!r}: {len(given)} tensors given for {len(cells)} planes"
            )
        if isinstance(layer, int):
            cells, given = [each[0] for each in cells], [each[0] for each in given]
        planes = (Plane(each, given[at] if given else None) for at, each in enumerate(cells))
        return cls(tuple(planes), covers, layout.rope == "rotated")

    @property
    def layers(self) -> int | None:
        """Number of layers of a range, None for a layer without a layer axis."""
        cells = self.planes[0].cells
        return len(cells) if len(cells.shape) > len(_AXES) else None


def _cells(
    memory: torch.Tensor,
    layout: Layout,
    shape: dict[Axis, int],
    start: dict[Axis, int],
    strides: dict[Axis, int],
) -> torch.Tensor:
    width = DTYPE_BYTES[layout.dtype]
    aligned = memory.storage_offset() % width == 0
    if memory.dtype != torch.uint8 or not memory.is_contiguous() or not aligned:
        raise ConfigError(
            f"a pool's memory is contiguous uint8 from a multiple of {width} bytes on, not "
            f"{memory.dtype} {tuple(memory.shape)} at byte {memory.storage_offset()}"
        )
    if strides["dim"] != width or any(stride % width for stride in strides.values()):
        raise ConfigError(
            f"the numbers of a head are adjacent, {width} bytes each: strides "
            f"{tuple(strides.values())} along {layout.order} do not fit"
        )
    begin = sum(at * strides[axis] for axis, at in start.items())
    return _viewed(memory, getattr(torch, layout.dtype), begin, shape, strides)


def _scales_after_cells(
    memory: torch.Tensor,
    layout: Layout,
    shape: dict[Axis, int],
    start: dict[Axis, int],
    strides: dict[Axis, int],
) -> torch.Tensor:
    """Return the scales after the numbers of each layer of each block, in the cells' shape."""
    if layout.strides is not None or set(layout.order[2:]) != _INSIDE:
        raise ConfigError(
            f"scales by {layout.scales!r} follow the layer of a block that is contiguous: "
            f"with the order {layout.order} and strides {layout.strides} they must be given"
        )
    heads = shape["head"] if layout.scales == "group" else 1
    dense = DTYPE_BYTES[layout.dtype] * math.prod(shape[axis] for axis in _INSIDE)
    plane = _SCALE_BYTES * shape["token"] * heads
    begin = start["layer"] * strides["layer"] + layout.scales_at(dense) + start["kv"] * plane
    apart: dict[Axis, int] = {
        "layer": strides["layer"],
        "block": strides["block"],
        "token": _SCALE_BYTES * heads,
        "head": _SCALE_BYTES if heads > 1 else 0,
    }
    return _viewed(memory, torch.float32, begin, shape, apart)


def _viewed(
    memory: torch.Tensor,
    dtype: torch.dtype,
    begin: int,
    shape: dict[Axis, int],
    strides: dict[Axis, int],
) -> torch.Tensor:
    """Return a view of numbers in a pool's bytes, from byte `begin` on, with strides in bytes."""
    width = dtype.itemsize
    along: tuple[Axis, ...] = ("layer", *_AXES)
    axes: list[Axis] = [axis for axis in along if axis in strides]
    last = begin + sum((shape[axis] - 1) * strides[axis] for axis in axes) + width
    if last > memory.numel():
        raise ConfigError(f"the layer ends at byte {last} of a pool of {memory.numel()} bytes")
    numbers = memory.view(-1)[: memory.numel() // width * width].view(dtype)
    return numbers.as_strided(
        [shape[axis] for axis in axes],
        [strides[axis] // width for axis in axes],
        numbers.storage_offset() + begin // width,
    )


def _spread(scales: torch.Tensor, cells: torch.Tensor, covers: Covers) -> torch.Tensor:
    """Return given scales as a view in the cells' shape, with stride 0 along shared axes."""
    layers, blocks, tokens, heads, _ = cells.shape
    wanted = {
        "tensor": (layers, 1, 1, 1),
        "head": (layers, 1, 1, heads),
        "token": (layers, blocks, tokens, 1),
        "group": (layers, blocks, tokens, heads),
    }.get(covers, ())
    if not wanted or scales.numel() != math.prod(wanted) or not scales.is_contiguous():
        raise ConfigError(
            f"scales by {covers!r} for {layers} layers, {blocks} blocks of {tokens} tokens and "
            f"{heads} heads are a contiguous {wanted}, not {tuple(scales.shape)}"
        )
    return scales.view(wanted).expand(layers, blocks, tokens, heads)


def _strides(layout: Layout, shape: dict[Axis, int], layer_bytes: int) -> dict[Axis, int]:
    if layout.strides is not None:
        return dict(zip(layout.order, layout.strides, strict=True))
    inside = set(layout.order[2:]) == _INSIDE
    if layout.alignment > 1 and not inside:
        raise ConfigError(
            f"an alignment of {layout.alignment} in the order {layout.order} needs strides: only "
            "contiguous layers of a block are padded"
        )
    step = DTYPE_BYTES[layout.dtype]
    dense = step * math.prod(shape[axis] for axis in _INSIDE)
    strides: dict[Axis, int] = {}
    for at in reversed(range(len(layout.order))):
        if inside and at == 1:
            step += layer_bytes - dense
        strides[layout.order[at]] = step
        step *= shape[layout.order[at]]
    return strides
