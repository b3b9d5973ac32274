"""Call: a kernel over planes of equal layout, with all its inputs and outputs.

Invariant: the arguments of a call have been checked (`checks`). The kernel and its twin take the
same call and write the same numbers. Cost: none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    import torch

    from kvtrie.kernels.pages import Covers, Plane
    from kvtrie.kernels.rope import Rope

__all__ = ["Call", "Kernel"]

Kernel: TypeAlias = Literal[
    "attend",
    "attend_backward",
    "attend_weights",
    "pack_int4",
    "paged_copy",
    "paged_gather",
    "paged_scatter",
    "rerotate",
    "scatter_fused_recompute",
    "unpack_int4",
]


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A launch over one or two planes.

    Attributes:
        kernel: name of the kernel.
        planes: planes of the pool, `(layers, blocks, block_tokens, heads, dim)` each. Two planes
            have the same shape and strides.
        covers: coverage of a scale.
        slots: int64 `(n,)`.
        skipped: uint8 `(n,)`, set to 1 for skipped tokens and to 0 for all remaining tokens.
        rows: per plane `(layers, n, heads, dim)`, with equal strides. Empty for `rerotate`.
        rotations: int64 `(n,)`, positions or deltas, empty without rotation.
        rope: tables of the rotation, None without rotation.
        keys: whether the first plane is rotated. A second plane never is.
        deviation: fp32 `(planes, n)`, written. None to skip it.
    """

    kernel: Kernel
    planes: tuple[Plane, ...]
    covers: Covers
    slots: torch.Tensor
    skipped: torch.Tensor
    rows: tuple[torch.Tensor, ...]
    rotations: torch.Tensor
    rope: Rope | None = None
    keys: bool = True
    deviation: torch.Tensor | None = None
