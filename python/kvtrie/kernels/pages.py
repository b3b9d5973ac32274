"""Pages: one layer of a pool as tensors that kernels and twins address by slot.

A slot is a token's place: `block * block_tokens + token of the block`.
Invariant: views only; the pool's bytes lie where its `Layout` says. Cost: no copy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch

from kvtrie.errors import ConfigError
from kvtrie.layout import DTYPE_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    from kvtrie.layout import Axis, Layout

__all__ = ["Covers", "Pages", "Plane"]

Covers: TypeAlias = Literal["none", "tensor", "head", "token", "group"]
_INSIDE: set[Axis] = {"kv", "token", "head", "dim"}


@dataclass(frozen=True, slots=True, eq=False)
class Plane:
    """K, V or latent vectors of one layer of a pool.

    Attributes:
        cells: `(blocks, block_tokens, heads, dim)`, strided as the layout wants.
        scales: fp32, what one code of a cell is worth: `(1,)` for the plane, `(heads,)`,
            `(capacity,)` by slot, or `(capacity, heads)`; None for plain numbers.
    """

    cells: torch.Tensor
    scales: torch.Tensor | None = None

    @property
    def capacity(self) -> int:
        """Slots: tokens that fit."""
        return self.cells.shape[0] * self.cells.shape[1]


@dataclass(frozen=True, slots=True, eq=False)
class Pages:
    """One layer of a pool.

    Attributes:
        planes: K and V, or the latent vectors alone.
        covers: what one scale covers, as in `Layout.scales`: "tensor" and "head" are given and
            stay; "token" (all heads of a token) and "group" (one head of a token) are found anew
            whenever a token is written.
        turned: whether keys carry their position's rotation.
    """

    planes: tuple[Plane, ...]
    covers: Covers = "none"
    turned: bool = True

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
        layer: int = 0,
        scales: Sequence[torch.Tensor] = (),
    ) -> Self:
        """The pages of one layer in a pool's memory.

        Args:
            memory: the pool's bytes, contiguous uint8: one tensor, or K's and V's where the layout
                splits them (`Pool.planes`).
            layout: where numbers lie in it.
            blocks: blocks (with layer slots: units, and `layers` is 1).
            block_tokens: tokens per block, any number.
            heads: heads of K and V on this rank.
            head_dim: numbers per head of K, or of the latent vector.
            v_head_dim: numbers per head of V where they differ.
            layers: layers in a block.
            layer: which of them.
            scales: one tensor per plane where the layout quantises; made here, empty, where slots
                have scales of their own and none are given.

        Raises:
            ConfigError: numbers that the layout cannot serve, or memory that is too small.
        """
        if not 0 <= layer < layers or min(blocks, block_tokens, heads, head_dim) < 1:
            raise ConfigError(
                f"layer {layer} of {layers} in {blocks} blocks of {block_tokens} tokens, {heads} "
                f"heads of {head_dim} cannot be"
            )
        sizes = layout.planes(block_tokens, heads, head_dim, v_head_dim)
        if len(memory) != len(sizes):
            raise ConfigError(f"the layout lies in {len(sizes)} tensors, {len(memory)} given")
        joined = layout.kv == "joined" and not layout.latent
        cells: list[torch.Tensor] = []
        for plane in range(1 if layout.latent else 2):
            at = 0 if joined else plane
            dim = (v_head_dim or head_dim) if plane else head_dim
            shape: dict[Axis, int] = {
                "block": blocks,
                "layer": layers,
                "kv": 2 if joined else 1,
                "token": block_tokens,
                "head": heads,
                "dim": dim,
            }
            start: dict[Axis, int] = {"layer": layer, "kv": plane if joined else 0}
            cells.append(_cells(memory[at], layout, shape, start, sizes[at]))
        if layout.scales in {"token", "group"} and not scales:
            by_slot = (blocks * block_tokens, *((heads,) if layout.scales == "group" else ()))
            scales = [torch.ones(by_slot, device=each.device) for each in cells]
        if len(scales) != (0 if layout.scales == "none" else len(cells)):
            raise ConfigError(
                f"scales by {layout.scales!r}: {len(scales)} tensors given for {len(cells)} planes"
            )
        planes = (Plane(each, scales[at] if scales else None) for at, each in enumerate(cells))
        return cls(tuple(planes), layout.scales, layout.rope == "rotated")


def _cells(
    memory: torch.Tensor,
    layout: Layout,
    shape: dict[Axis, int],
    start: dict[Axis, int],
    layer_bytes: int,
) -> torch.Tensor:
    width = DTYPE_BYTES[layout.dtype]
    aligned = memory.storage_offset() % width == 0
    if memory.dtype != torch.uint8 or not memory.is_contiguous() or not aligned:
        raise ConfigError(
            f"a pool's memory is contiguous uint8 from a multiple of {width} bytes on, not "
            f"{memory.dtype} {tuple(memory.shape)} at byte {memory.storage_offset()}"
        )
    strides = _strides(layout, shape, width, layer_bytes)
    if strides["dim"] != width or any(stride % width for stride in strides.values()):
        raise ConfigError(
            f"the numbers of a head lie side by side, {width} bytes each: strides "
            f"{tuple(strides.values())} along {layout.order} do not fit"
        )
    begin = sum(at * strides[axis] for axis, at in start.items())
    axes: tuple[Axis, ...] = ("block", "token", "head", "dim")
    last = begin + sum((shape[axis] - 1) * strides[axis] for axis in axes) + width
    if last > memory.numel():
        raise ConfigError(f"the layer ends at byte {last} of a pool of {memory.numel()} bytes")
    usable = memory.view(-1)[: memory.numel() // width * width]
    numbers = usable.view(getattr(torch, layout.dtype))
    return numbers.as_strided(
        [shape[axis] for axis in axes],
        [strides[axis] // width for axis in axes],
        numbers.storage_offset() + begin // width,
    )


def _strides(
    layout: Layout, shape: dict[Axis, int], width: int, layer_bytes: int
) -> dict[Axis, int]:
    if layout.strides is not None:
        return dict(zip(layout.order, layout.strides, strict=True))
    inside = set(layout.order[2:]) == _INSIDE
    if layout.alignment > 1 and not inside:
        raise ConfigError(
            f"an alignment of {layout.alignment} in the order {layout.order} needs strides: only "
            "layers of a block that lie in one piece are padded"
        )
    dense = width * math.prod(shape[axis] for axis in _INSIDE)
    strides: dict[Axis, int] = {}
    step = width
    for at in reversed(range(len(layout.order))):
        if inside and at == 1:
            step += layer_bytes - dense
        strides[layout.order[at]] = step
        step *= shape[layout.order[at]]
    return strides
