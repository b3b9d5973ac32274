"""Call: one kernel over planes of equal layout, with everything that it reads and writes.

Invariant: the arguments of a call have been checked (`checks`); the kernel and its twin take the
same call and leave the same numbers. Cost: none.
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
    """One launch over one or two planes.

    Attributes:
        kernel: which.
        planes: the pool's side, `(layers, blocks, block_tokens, heads, dim)` each; two have the
            same shape and strides.
        covers: what one of their scales covers.
        slots: int64 `(n,)`.
        skipped: uint8 `(n,)`, becomes 1 where a token was passed over and 0 elsewhere.
        rows: per plane `(layers, n, heads, dim)`, of the same strides; none for `rerotate`.
        turns: int64 `(n,)`, positions or deltas; empty where nothing turns.
        rope: what turns; None where nothing does.
        keys: whether the first plane is the one that turns; a second one never does.
        deviation: fp32 `(planes, n)`, written; None if not wanted.
    """

    kernel: Kernel
    planes: tuple[Plane, ...]
    covers: Covers
    slots: torch.Tensor
    skipped: torch.Tensor
    rows: tuple[torch.Tensor, ...]
    turns: torch.Tensor
    rope: Rope | None = None
    keys: bool = True
    deviation: torch.Tensor | None = None
