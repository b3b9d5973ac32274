"""Twin: what each kernel means, in torch, one statement per step.

Kernels are held against these, and these against a loop over single numbers.
Invariant: arithmetic is in fp32, and what keeps its format keeps its bits. A slot or position out
of range is passed over. Cost: several passes over the tokens; it also runs where there is no GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvtrie.kernels.formats import LARGEST

if TYPE_CHECKING:
    from kvtrie.kernels.call import Call
    from kvtrie.kernels.rope import Rope

__all__ = ["run"]

_LEAST_SCALE = 2.0**-126


@torch.no_grad()
def run(call: Call) -> None:
    """Do on the CPU (or anywhere) what the call's kernel does."""
    inside = _inside(call)
    call.skipped.copy_(~inside)
    slots = call.slots[inside]
    if call.kernel == "paged_gather":
        call.rows[inside] = _read(call, slots, call.rows.dtype)
        return
    turns_in_place = call.kernel == "rerotate"
    fresh = _read(call, slots, torch.float32) if turns_in_place else call.rows[inside]
    if call.rope is not None:
        fresh = _turn(fresh.float(), call.rope, call.turns[inside])
    if call.deviation is not None:
        stood = _read(call, slots, torch.float32)
        call.deviation.zero_()
        call.deviation[inside] = (fresh.float() - stood).square().sum(dim=(1, 2))
    _write(call, slots, fresh)


def _inside(call: Call) -> torch.Tensor:
    inside = (call.slots >= 0) & (call.slots < call.plane.capacity)
    if call.rope is not None:
        least = -call.rope.length if call.kernel == "rerotate" else -1
        inside &= (call.turns > least) & (call.turns < call.rope.length)
    return inside


def _turn(keys: torch.Tensor, rope: Rope, by: torch.Tensor) -> torch.Tensor:
    cos = rope.cos[by.abs()][:, None, :]
    sin = rope.sin[by.abs()][:, None, :] * by.sign()[:, None, None]
    turned = keys.clone()
    part = turned[..., rope.first : rope.first + rope.width]
    half = rope.width // 2
    x, y = (
        (part[..., 0::2], part[..., 1::2])
        if rope.neighbours
        else (part[..., :half], part[..., half:])
    )
    new_x, new_y = x * cos - y * sin, y * cos + x * sin
    x.copy_(new_x)
    y.copy_(new_y)
    return turned


def _scales(call: Call, slots: torch.Tensor) -> torch.Tensor:
    """What a code at each slot and head is worth: something that spreads to `(n, heads, 1)`."""
    scales = call.plane.scales
    if scales is None:
        return torch.ones((1, 1, 1), device=slots.device)
    if call.covers == "group":
        return scales[slots][:, :, None]
    if call.covers == "token":
        return scales[slots][:, None, None]
    return scales[None, :, None]


def _read(call: Call, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    plane = call.plane
    tokens = plane.cells.shape[1]
    cells = plane.cells[slots // tokens, slots % tokens]
    if plane.scales is None:
        return cells.to(dtype)
    return (cells.float() * _scales(call, slots)).to(dtype)


def _write(call: Call, slots: torch.Tensor, fresh: torch.Tensor) -> None:
    plane = call.plane
    if plane.scales is not None:
        fresh = fresh.float()
        largest = LARGEST[plane.cells.dtype]
        if call.covers in {"token", "group"}:
            over = (1, 2) if call.covers == "token" else (2,)
            least = (fresh.abs().amax(dim=over) / largest).clamp(min=_LEAST_SCALE)
            plane.scales[slots] = least
        fresh = (fresh * (1.0 / _scales(call, slots))).clamp(-largest, largest)
        if plane.cells.dtype == torch.int8:
            fresh = fresh.round()
    tokens = plane.cells.shape[1]
    plane.cells[slots // tokens, slots % tokens] = fresh.to(plane.cells.dtype)
