"""Twin: reference implementations of the kernels in torch, a statement per step.

Tests compare kernels with twins, and twins with loops over single numbers.
Invariant: arithmetic is in fp32, and numbers that keep their format keep their bits. Slots and
positions out of range are skipped. Cost: several passes over the tokens. No GPU is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvtrie.kernels.formats import LARGEST
from kvtrie.kernels.pages import FRESH

if TYPE_CHECKING:
    from kvtrie.kernels.call import Call
    from kvtrie.kernels.pages import Covers, Plane
    from kvtrie.kernels.rope import Rope

__all__ = ["run"]

_LEAST_SCALE = 2.0**-126


@torch.no_grad()
def run(call: Call) -> None:
    """Compute a call in torch, on any device."""
    inside = _inside(call)
    call.skipped.copy_(~inside)
    slots = call.slots[inside]
    for at, plane in enumerate(call.planes):
        if call.kernel == "paged_gather":
            call.rows[at][:, inside] = _read(plane, slots, call.rows[at].dtype)
            continue
        turns_in_place = call.kernel == "rerotate"
        fresh = _read(plane, slots, torch.float32) if turns_in_place else call.rows[at][:, inside]
        if call.rope is not None and call.keys and at == 0:
            fresh = _rotate(fresh.float(), call.rope, call.rotations[inside])
        if call.deviation is not None:
            stored = _read(plane, slots, torch.float32)
            call.deviation[at].zero_()
            call.deviation[at, inside] = (fresh.float() - stored).square().sum(dim=(0, 2, 3))
        part = slice(None)
        if turns_in_place and call.rope is not None and call.covers not in FRESH:
            part = call.rope.part
        _write(plane, call.covers, slots, fresh, part)


def _inside(call: Call) -> torch.Tensor:
    inside = (call.slots >= 0) & (call.slots < call.planes[0].capacity)
    if call.rope is not None:
        least = -call.rope.length if call.kernel == "rerotate" else -1
        inside &= (call.rotations > least) & (call.rotations < call.rope.length)
    return inside


def _rotate(keys: torch.Tensor, rope: Rope, by: torch.Tensor) -> torch.Tensor:
    cos = rope.cos[by.abs()][:, None, :]
    sin = rope.sin[by.abs()][:, None, :] * by.sign()[:, None, None]
    rotated_keys = keys.clone()
    part = rotated_keys[..., rope.part]
    half = rope.width // 2
    x, y = (
        (part[..., 0::2], part[..., 1::2])
        if rope.neighbours
        else (part[..., :half], part[..., half:])
    )
    new_x, new_y = x * cos - y * sin, y * cos + x * sin
    x.copy_(new_x)
    y.copy_(new_y)
    return rotated_keys


def _read(plane: Plane, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers in slots of every layer, `(layers, n, heads, dim)`."""
    where = _places(plane, slots)
    cells = plane.cells[where]
    if plane.scales is None:
        return cells.to(dtype)
    return (cells.float() * plane.scales[where][..., None]).to(dtype)


def _write(
    plane: Plane, covers: Covers, slots: torch.Tensor, fresh: torch.Tensor, part: slice
) -> None:
    where = _places(plane, slots)
    if plane.scales is not None:
        fresh = fresh.float()
        largest = LARGEST[plane.cells.dtype]
        if covers == "token":
            least = (fresh.abs().amax(dim=(2, 3)) / largest).clamp(min=_LEAST_SCALE)
            plane.scales[..., 0][where] = least
        if covers == "group":
            plane.scales[where] = (fresh.abs().amax(dim=3) / largest).clamp(min=_LEAST_SCALE)
        scales = plane.scales[where][..., None]
        fresh = (fresh * (1.0 / scales)).clamp(-largest, largest)
        if plane.cells.dtype == torch.int8:
            fresh = fresh.round()
    plane.cells[(*where, slice(None), part)] = fresh[..., part].to(plane.cells.dtype)


def _places(plane: Plane, slots: torch.Tensor) -> tuple[slice, torch.Tensor, torch.Tensor]:
    tokens = plane.cells.shape[2]
    return slice(None), slots // tokens, slots % tokens
