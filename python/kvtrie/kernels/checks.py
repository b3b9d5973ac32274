"""Checks: validation of arguments on the host, before any kernel or twin runs.

Slots and positions on a device are not read here, because reading would wait for the device. The
kernel skips and flags values out of range.
Invariant: a checked call can read and write only its own tensors. Cost: arithmetic on shapes, and a
read of slots and positions on the CPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvtrie.errors import ConfigError
from kvtrie.kernels.formats import CELLS, LARGEST, ROWS, VECTOR_BYTES

if TYPE_CHECKING:
    from kvtrie.kernels.pages import Covers, Plane
    from kvtrie.kernels.rope import Rope

__all__ = ["MOST_THREADS", "check_indices", "check_plane", "check_rope", "check_rows", "vector"]

MOST_THREADS = 1024
"""Largest number of threads of a block. A block processes whole tokens."""

_AXES = ("blocks", "block_tokens", "heads", "dim")
_MOST_LAYERS = 65_535
_INDICES = (torch.int64, torch.int32, torch.int16, torch.uint8)


def vector(dtype: torch.dtype) -> int:
    """Return the numbers of this format in a vector of 16 bytes, the access size of a lane."""
    return VECTOR_BYTES // dtype.itemsize


def check_plane(plane: Plane, covers: Covers, step: int) -> None:
    """Check a plane for reads and writes of `step` numbers at a time.

    Raises:
        ConfigError: formats, scales, strides or sizes not supported by the kernels.
    """
    cells = plane.cells
    beyond = len(cells.shape) - len(_AXES)
    if beyond not in {0, 1} or cells.dtype not in CELLS:
        raise ConfigError(
            f"cells are ([layers,] {', '.join(_AXES)}) of {_names(CELLS)}, not "
            f"{cells.dtype} {tuple(cells.shape)}"
        )
    heads, dim = cells.shape[-2:]
    layers = len(cells) if beyond else 1
    if plane.capacity >= 2**31 or layers > _MOST_LAYERS:
        raise ConfigError(
            f"a plane of {plane.capacity} slots and {layers} layers: below 2**31 and at most "
            f"{_MOST_LAYERS} wanted"
        )
    if dim % (2 * step) or dim == 0:
        raise ConfigError(f"a head of {dim} numbers is no multiple of {2 * step}")
    if heads * dim // (2 * step) > MOST_THREADS:
        raise ConfigError(
            f"a token of {heads} heads of {dim} takes {heads * dim // (2 * step)} threads of "
            f"{2 * step} numbers, at most {MOST_THREADS} wanted"
        )
    _check_strides("cells", cells, min(VECTOR_BYTES, step * cells.element_size()))
    if (covers == "none") != (cells.dtype not in LARGEST):
        raise ConfigError(f"cells of {cells.dtype} and scales by {covers!r} do not go together")
    scales, wanted = plane.scales, tuple(cells.shape[:-1])
    if covers == "none" and scales is None:
        return
    if scales is None or tuple(scales.shape) != wanted or scales.dtype != torch.float32:
        given = None if scales is None else f"{scales.dtype} {tuple(scales.shape)}"
        raise ConfigError(f"scales by {covers!r} are float32 {wanted} here, not {given}")
    # Scales along these axes must be separate in memory.
    own = {"token": scales.dim() - 1, "group": scales.dim()}.get(covers, 0)
    if any(scales.shape[at] > 1 and scales.stride(at) == 0 for at in range(own)):
        raise ConfigError(
            f"scales by {covers!r} are written each by itself, not shared by strides "
            f"{scales.stride()}"
        )
    _same_device("scales", scales, cells)


def check_rows(rows: torch.Tensor, plane: Plane, tokens: int) -> None:
    """Check the rows of `tokens` tokens in every layer.

    Raises:
        ConfigError: a format, shape, stride or device does not match the plane.
    """
    wanted = (*plane.cells.shape[:-4], tokens, *plane.cells.shape[-2:])
    if rows.dtype not in ROWS or tuple(rows.shape) != wanted:
        raise ConfigError(
            f"rows are {wanted} of {_names(ROWS)} here, not {rows.dtype} {tuple(rows.shape)}"
        )
    _check_strides("rows", rows, VECTOR_BYTES)
    _same_device("rows", rows, plane.cells)


def check_rope(rope: Rope, plane: Plane, step: int) -> None:
    """Check the tables for the plane's heads.

    Raises:
        ConfigError: the rotary part is too wide, not at an end, or no multiple of 2 steps.
    """
    dim = plane.cells.shape[-1]
    ends = rope.first == 0 or rope.first + rope.width == dim
    if rope.width % (2 * step) or rope.first + rope.width > dim or not ends:
        raise ConfigError(
            f"numbers {rope.first} to {rope.first + rope.width} of a head of {dim} cannot turn: "
            f"at either end, a multiple of {2 * step} wanted"
        )
    _same_device("the tables of cosines", rope.cos, plane.cells)


def check_indices(
    name: str,
    given: torch.Tensor,
    tokens: int,
    bounds: tuple[int, int],
    device: torch.device,
    *,
    distinct: bool = False,
) -> torch.Tensor:
    """Check an integer per token and return the integers as int64 on the device.

    Args:
        name: name of the integers, for errors.
        given: integers `(tokens,)`.
        tokens: required number of integers.
        bounds: the smallest allowed value, and the end, exclusive. Checked only on the CPU.
        device: device of the cells. The integers are there or on the CPU.
        distinct: whether all must differ.

    Raises:
        ConfigError: a wrong format, shape or device, or a value out of bounds or repeated.
    """
    if given.dtype not in _INDICES or tuple(given.shape) != (tokens,):
        raise ConfigError(f"{name} are {tokens} integers, not {given.dtype} {tuple(given.shape)}")
    if given.device.type != "cpu":
        if given.device != device:
            raise ConfigError(f"{name} are on {given.device}, cells on {device}")
        return given.long().contiguous()
    low, high = bounds
    outside = torch.nonzero((given < low) | (given >= high)).view(-1)
    if outside.numel():
        at = int(outside[0])
        raise ConfigError(
            f"{name}[{at}] is {int(given[at])}, {low} to {high - 1} wanted "
            f"({outside.numel()} of {tokens} are outside)"
        )
    if distinct:
        ordered = given.sort().values
        twice = torch.nonzero(ordered[1:] == ordered[:-1]).view(-1)
        if twice.numel():
            raise ConfigError(f"{name} name {int(ordered[twice[0]])} twice")
    return given.long().contiguous().to(device)


def _check_strides(name: str, tensor: torch.Tensor, align: int) -> None:
    width, apart = tensor.element_size(), tensor.data_ptr()
    if tensor.is_contiguous() and not (apart | tensor.shape[-1] * width) % align:
        return
    strides = [
        stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1
    ]
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ConfigError(
            f"the numbers of a head are adjacent in {name}, not {tensor.stride(-1)} apart"
        )
    if tensor.data_ptr() % align or any(stride * width % align for stride in strides[:-1]):
        raise ConfigError(
            f"heads in {name} start at multiples of {align} bytes, not with strides "
            f"{tensor.stride()} of {width} bytes from address {tensor.data_ptr():#x} on"
        )


def _same_device(name: str, tensor: torch.Tensor, cells: torch.Tensor) -> None:
    if tensor.device != cells.device:
        raise ConfigError(f"{name} are on {tensor.device}, cells on {cells.device}")


def _names(formats: dict[torch.dtype, str]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in formats)
