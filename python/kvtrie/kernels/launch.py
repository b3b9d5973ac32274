"""Launch: formats, grid and arguments of a kernel, and its start on a device.

Invariant: arguments are in the order of the kernel's signature, all eight bytes wide. Cost: a few
microseconds of Python per launch, without waiting for the device.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvtrie.kernels.checks import vector
from kvtrie.kernels.cubin import core, loaded
from kvtrie.kernels.formats import CELLS, ROWS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtrie.kernels.call import Call, Kernel

__all__ = ["Launch", "launch", "start", "step_format"]

_THREADS = 256  # enough to hide a block's start, more for a wide token
_FOUND = {"token": 1, "group": 2}  # as `Found` in paged.cuh


def step_format(cells: torch.dtype) -> torch.dtype:
    """Return the format for the vectors of `rerotate`: the cells' own, or bf16 for byte cells."""
    return cells if cells in ROWS else torch.bfloat16


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """The start of a kernel.

    Attributes:
        row: format of rows, by its name in CUDA.
        cell: format of cells.
        grid: blocks of threads along tokens, layers and planes.
        block: threads along lanes, heads and tokens.
        arguments: numbers, and tensors for their addresses.
        width: numbers of a head with room in a block, for the kernels of attention.
    """

    row: str
    cell: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    arguments: tuple[torch.Tensor | int, ...]
    width: int = 0

    @classmethod
    def of(cls, call: Call, *, threads: int = _THREADS) -> Launch:
        """Return the launch of a call's kernel, in blocks of about `threads` threads."""
        cells = call.planes[0].cells
        rows = step_format(cells.dtype) if call.kernel == "rerotate" else call.rows[0].dtype
        layers, _, block_tokens, heads, dim = cells.shape
        lanes = dim // (2 * vector(rows))
        tokens = call.slots.shape[0]
        deep = max(1, min(64, threads // (lanes * heads), tokens))
        return cls(
            row=ROWS[rows],
            cell=CELLS[cells.dtype],
            grid=(-(-tokens // deep), layers, len(call.planes)),
            block=(lanes, heads, deep),
            arguments=(
                *_both(call, [plane.cells for plane in call.planes]),
                *cells.stride()[:4],
                block_tokens,
                call.planes[0].capacity,
                *_scales(call),
                *_between(call),
                call.slots,
                tokens,
                call.skipped,
                *_after(call),
            ),
        )


def launch(call: Call) -> None:
    """Start a call's kernel on its device, in torch's current stream."""
    start(call.kernel, Launch.of(call), call.slots.device)


def start(kernel: Kernel, what: Launch, device: torch.device) -> None:
    """Start a kernel on a device, in torch's current stream."""
    cuda, at = core(), device.index
    with nullcontext() if at == torch.cuda.current_device() else torch.cuda.device(at):
        code = loaded(kernel, _arch(at), what.row, what.cell, what.width)
        arguments = [each if isinstance(each, int) else each.data_ptr() for each in what.arguments]
        config = cuda.LaunchConfig(grid=what.grid, block=what.block)
        cuda.launch(_stream(_current(at)), config, code, *arguments)


def _current(device: int) -> int:
    """Return the handle of torch's current stream, without the slow public call."""
    return torch._C._cuda_getCurrentRawStream(device)  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]


@functools.cache
def _arch(device: int) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


@functools.cache
def _stream(handle: int) -> Any:  # noqa: ANN401 - cuda.core's Stream
    """Return torch's stream as a cached object of cuda.core."""
    return core().Stream.from_handle(handle)


def _both(call: Call, given: Sequence[torch.Tensor]) -> tuple[torch.Tensor | int, ...]:
    """Return the arguments of both planes for the kernel, only of keys for `rerotate`."""
    missing = (1 if call.kernel == "rerotate" else 2) - len(given)
    return (*given, *([0] * missing))


def _scales(call: Call) -> tuple[torch.Tensor | int, ...]:
    """Return scales and strides, and for writing kernels the kind of computed scales."""
    scales = [plane.scales for plane in call.planes if plane.scales is not None]
    apart = scales[0].stride() if scales else (0, 0, 0, 0)
    found = () if call.kernel == "paged_gather" else (_FOUND.get(call.covers, 0),)
    return (*_both(call, scales), *apart, *found)


def _between(call: Call) -> tuple[torch.Tensor | int, ...]:
    rows = (*_both(call, call.rows), *call.rows[0].stride()[:3]) if call.rows else ()
    if call.kernel in {"paged_gather", "paged_scatter"}:
        return rows
    fused = call.kernel == "scatter_fused_recompute"
    rope = call.rope
    if rope is None:
        return (*rows, 0, 0, 0, 0, 0, 0, 0, *((0,) if fused else ()))
    tables = (rope.cos, rope.sin, rope.length, rope.first, rope.width, int(rope.neighbours))
    return (*rows, call.rotations, *tables, *((int(call.keys),) if fused else ()))


def _after(call: Call) -> tuple[torch.Tensor | int, ...]:
    if call.kernel != "scatter_fused_recompute":
        return ()
    return (0 if call.deviation is None else call.deviation,)
