"""Int4: whole blocks packed to 4-bit codes with scales in fp16, and unpacked to rows.

A scale covers up to 32 numbers. A group of K has the numbers of a channel in consecutive tokens,
and its minimum is stored too (codes 0 to 15). A group of V has consecutive numbers of a token's
head. Its scale is the number of largest magnitude divided by -8, so this number has code -8.
Invariant: invalid arguments are refused before any write. Kernel and twin write the same bytes.
Cost: a launch each for K and V. The twin takes several passes on the CPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvtrie.errors import ConfigError
from kvtrie.kernels.checks import check_indices
from kvtrie.kernels.formats import ROWS, VECTOR_BYTES
from kvtrie.kernels.launch import Launch, start
from kvtrie.model.layout import INT4_GROUP

if TYPE_CHECKING:
    from kvtrie.kernels.call import Kernel

__all__ = ["Packed", "check_packed", "launch_of", "pack", "unpack"]

_THREADS = 256
_STEP = 16  # numbers of a head: gives whole vectors of codes for all row formats
_MOST = 65504.0  # of fp16
_MOST_JOBS = 1 << 31  # of a launch: the kernel counts jobs in 32 bits


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """K or V of the units of a pool in int4.

    Attributes:
        memory: uint8 `(units, bytes of a unit)`.
        codes_at: byte of a unit at which the codes begin.
        scales_at: byte of a unit at which the scales begin, a multiple of 16.
        block_tokens: tokens of a unit.
        heads: heads.
        dim: numbers of a head.
        keys: whether it is K, with scales per channel.
    """

    memory: torch.Tensor
    codes_at: int
    scales_at: int
    block_tokens: int
    heads: int
    dim: int
    keys: bool

    @property
    def scales(self) -> tuple[int, int, int, int]:
        """Shape of a unit's fp16 numbers: scales, and for K minimums too."""
        if self.keys:
            return (2, -(-self.block_tokens // INT4_GROUP), self.heads, self.dim)
        return (1, self.block_tokens, self.heads, -(-self.dim // INT4_GROUP))


def check_packed(dim: int) -> None:
    """Refuse heads not supported by the int4 kernels.

    Raises:
        ConfigError: the numbers of a head are no multiple of 16.
    """
    if dim < _STEP or dim % _STEP:
        raise ConfigError(f"a head of {dim} numbers is no multiple of {_STEP}, which int4 wants")


def pack(packed: Packed, units: torch.Tensor, rows: torch.Tensor) -> None:
    """Write rows of whole blocks into units.

    Args:
        packed: the target.
        units: integers `(n,)` on the CPU, all different.
        rows: fp32, fp16 or bf16 `(n * block_tokens, heads, dim)`, contiguous.

    Raises:
        ConfigError: arguments not supported by the kernels. Nothing is written then.
    """
    where = _checked(packed, units, rows, distinct=True)
    _run("pack_int4", packed, where, rows)


def unpack(packed: Packed, units: torch.Tensor, rows: torch.Tensor) -> None:
    """Read units into rows of whole blocks, with the arguments of `pack`. Units may repeat.

    Raises:
        ConfigError: arguments not supported by the kernels. Nothing is written then.
    """
    where = _checked(packed, units, rows, distinct=False)
    _run("unpack_int4", packed, where, rows)


def launch_of(kernel: Kernel, packed: Packed, units: torch.Tensor, rows: torch.Tensor) -> Launch:
    """Return the launch of a kernel over `units`, int64 on the device of the memory."""
    vectors = packed.dim // (VECTOR_BYTES // rows.element_size())
    jobs = packed.block_tokens * packed.heads * vectors
    if kernel == "pack_int4":
        _, groups, _, last = packed.scales
        jobs = packed.heads * groups * (vectors if packed.keys else last)
    total = jobs * len(units)
    return Launch(
        row=ROWS[rows.dtype],
        cell="int8",  # not used: codes are bytes
        grid=(-(-total // _THREADS), 1, 1),
        block=(_THREADS, 1, 1),
        arguments=(
            rows,
            packed.memory,
            packed.memory.stride(0),
            packed.codes_at,
            packed.scales_at,
            packed.block_tokens,
            packed.heads,
            packed.dim,
            int(packed.keys),
            units,
            len(units),
        ),
    )


def _checked(
    packed: Packed, units: torch.Tensor, rows: torch.Tensor, *, distinct: bool
) -> torch.Tensor:
    check_packed(packed.dim)
    count, memory = len(units), packed.memory
    wanted = (count * packed.block_tokens, packed.heads, packed.dim)
    if rows.dtype not in ROWS or tuple(rows.shape) != wanted or not rows.is_contiguous():
        raise ConfigError(
            f"rows of {count} units are {wanted}, contiguous, in {', '.join(ROWS.values())}, not "
            f"{rows.dtype} {tuple(rows.shape)}"
        )
    if rows.device != memory.device:
        raise ConfigError(f"rows are on {rows.device}, units on {memory.device}")
    apart = memory.data_ptr() | memory.stride(0) | packed.scales_at | rows.data_ptr()
    if memory.dtype != torch.uint8 or memory.dim() != 2 or apart % VECTOR_BYTES:  # noqa: PLR2004
        raise ConfigError(
            f"units are uint8 (units, bytes) and begin, as their scales do, at multiples of "
            f"{VECTOR_BYTES} bytes, not {memory.dtype} {tuple(memory.shape)} from "
            f"{memory.data_ptr():#x} on, {memory.stride(0)} bytes apart, scales at "
            f"{packed.scales_at}"
        )
    if rows.numel() >= _MOST_JOBS:
        raise ConfigError(f"{rows.numel()} numbers at once, below {_MOST_JOBS} wanted")
    if units.device.type != "cpu":
        raise ConfigError(f"numbers of units are on {units.device}, wanted on the CPU")
    bounds = (0, len(memory))
    return check_indices("units", units, count, bounds, memory.device, distinct=distinct)


def _run(kernel: Kernel, packed: Packed, units: torch.Tensor, rows: torch.Tensor) -> None:
    if not len(units):
        return
    if rows.device.type == "cuda":
        start(kernel, launch_of(kernel, packed, units, rows), rows.device)
    elif kernel == "pack_int4":
        pack_twin(packed, units, rows)
    else:
        unpack_twin(packed, units, rows)


@torch.no_grad()
def pack_twin(packed: Packed, units: torch.Tensor, rows: torch.Tensor) -> None:
    """Pack rows in torch, the reference of `pack_int4`."""
    numbers = _grouped(packed, rows.float())
    along = 2 if packed.keys else -1
    most, least = numbers.amax(along, keepdim=True), numbers.amin(along, keepdim=True)
    if packed.keys:
        noted, lowest = [(most - least) / 15, least], 0
    else:
        noted, lowest = [torch.where(most > -least, most, least) * -0.125], -8
    halves = [(each.clamp(-_MOST, _MOST) + 0.0).half() for each in noted]  # no negative zero
    scale = halves[0].float()
    zero = halves[1].float() if packed.keys else 0.0
    inverse = torch.where(scale == 0, 0.0, 1.0 / scale)
    exact = ((numbers - zero) * inverse).clamp(lowest, lowest + 15)
    codes, count = (
        _ungrouped(packed, exact.round().to(torch.int8)).view(torch.uint8) & 15,
        len(units),
    )
    _codes(packed)[units] = (codes[..., 0::2] | codes[..., 1::2] << 4).view(count, -1)
    kept = torch.stack([each.reshape(count, -1) for each in halves], dim=1)
    _scales(packed)[units] = kept.view(count, -1).view(torch.uint8)


@torch.no_grad()
def unpack_twin(packed: Packed, units: torch.Tensor, rows: torch.Tensor) -> None:
    """Unpack rows in torch, the reference of `unpack_int4`."""
    count = len(units)
    pairs = _codes(packed)[units]
    codes = torch.stack((pairs & 15, pairs >> 4), dim=-1)
    numbers = codes.float() if packed.keys else ((codes ^ 8).to(torch.int8) - 8).float()
    kept = _scales(packed)[units].view(torch.float16).float().view(count, *packed.scales)
    along = 2 if packed.keys else -1
    scale = kept[:, 0].unsqueeze(along)
    zero = kept[:, 1].unsqueeze(along) if packed.keys else 0.0
    wide = _grouped(packed, numbers.view(-1, packed.heads, packed.dim)) * scale + zero
    rows.copy_(_ungrouped(packed, wide).view(rows.shape))


def _grouped(packed: Packed, numbers: torch.Tensor) -> torch.Tensor:
    """Return numbers with an axis along each group, filled up with the group's last numbers.

    `(n, groups, 32, heads, dim)` for K, `(n, tokens, heads, groups, 32)` for V.
    """
    blocks = numbers.view(-1, packed.block_tokens, packed.heads, packed.dim)
    if packed.keys:
        last = blocks[:, -1:].expand(-1, -packed.block_tokens % INT4_GROUP, -1, -1)
        return torch.cat((blocks, last), 1).view(
            len(blocks), -1, INT4_GROUP, packed.heads, packed.dim
        )
    last = blocks[..., -1:].expand(-1, -1, -1, -packed.dim % INT4_GROUP)
    return torch.cat((blocks, last), -1).view(*blocks.shape[:3], -1, INT4_GROUP)


def _ungrouped(packed: Packed, grouped: torch.Tensor) -> torch.Tensor:
    """Undo `_grouped` and return `(n, tokens, heads, dim)`."""
    if packed.keys:
        return grouped.flatten(1, 2)[:, : packed.block_tokens].contiguous()
    return grouped.flatten(3)[..., : packed.dim].contiguous()


def _codes(packed: Packed) -> torch.Tensor:
    """Return the codes of all units, `(units, bytes)`."""
    size = packed.block_tokens * packed.heads * packed.dim // 2
    return packed.memory[:, packed.codes_at : packed.codes_at + size]


def _scales(packed: Packed) -> torch.Tensor:
    """Return the scales of all units, `(units, bytes)`."""
    size = math.prod(packed.scales) * torch.float16.itemsize
    return packed.memory[:, packed.scales_at : packed.scales_at + size]
