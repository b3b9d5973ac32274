"""Launch: a call as a kernel sees it (formats, grid, arguments), and its start on a device.

Invariant: arguments stand in the order of the kernel's signature, all eight bytes wide. Cost: a
few microseconds of Python per launch; nothing waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvtrie.kernels.checks import vector
from kvtrie.kernels.cubin import core, loaded
from kvtrie.kernels.formats import CELLS, ROWS

if TYPE_CHECKING:
    from kvtrie.kernels.call import Call

__all__ = ["Launch", "step_format"]

_THREADS = 256  # enough to hide a block's start; a wider token takes more


def step_format(cells: torch.dtype) -> torch.dtype:
    """The format whose vectors `rerotate` goes by: the cells' own, or bf16 for one-byte cells."""
    return cells if cells in ROWS else torch.bfloat16


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """One kernel's start.

    Attributes:
        row: format of rows, as CUDA names it.
        cell: format of cells.
        grid: blocks of threads.
        block: threads along lanes, heads and tokens.
        arguments: numbers and tensors (their addresses count).
    """

    row: str
    cell: str
    grid: int
    block: tuple[int, int, int]
    arguments: tuple[torch.Tensor | int, ...]

    @classmethod
    def of(cls, call: Call, *, threads: int = _THREADS) -> Launch:
        """What starts a call's kernel, in blocks of about so many threads."""
        cells = call.plane.cells
        rows = step_format(cells.dtype) if call.kernel == "rerotate" else call.rows.dtype
        _, block_tokens, heads, dim = cells.shape
        lanes = dim // (2 * vector(rows))
        tokens = call.slots.shape[0]
        deep = max(1, min(64, threads // (lanes * heads), tokens))
        return cls(
            row=ROWS[rows],
            cell=CELLS[cells.dtype],
            grid=-(-tokens // deep),
            block=(lanes, heads, deep),
            arguments=(
                cells,
                *cells.stride()[:3],
                block_tokens,
                call.plane.capacity,
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
    cuda = core()
    device = call.slots.device
    major, minor = torch.cuda.get_device_capability(device)
    what = Launch.of(call)
    with torch.cuda.device(device):
        kernel = loaded(call.kernel, f"sm_{major}{minor}", what.row, what.cell)
        arguments = [each if isinstance(each, int) else each.data_ptr() for each in what.arguments]
        config = cuda.LaunchConfig(grid=what.grid, block=what.block)
        cuda.launch(torch.cuda.current_stream(device), config, kernel, *arguments)


def _scales(call: Call) -> tuple[torch.Tensor | int, int, int]:
    """Scales, and how far apart those of two slots and of two heads are."""
    if call.plane.scales is None:
        return 0, 0, 0
    heads = call.plane.cells.shape[2]
    apart = {"tensor": (0, 0), "head": (0, 1), "token": (1, 0), "group": (heads, 1)}
    return (call.plane.scales, *apart[call.covers])


def _between(call: Call) -> tuple[torch.Tensor | int, ...]:
    rows = () if call.kernel == "rerotate" else (call.rows, *call.rows.stride()[:2])
    if call.kernel in {"paged_gather", "paged_scatter"}:
        return rows
    rope = call.rope
    if rope is None:
        return (*rows, 0, 0, 0, 0, 0, 0, 0)
    tables = (rope.cos, rope.sin, rope.length, rope.first, rope.width, int(rope.neighbours))
    return (*rows, call.turns, *tables)


def _after(call: Call) -> tuple[torch.Tensor | int, ...]:
    if call.kernel != "scatter_fused_recompute":
        return ()
    return (0 if call.deviation is None else call.deviation,)
