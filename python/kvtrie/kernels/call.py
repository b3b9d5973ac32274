"""Call: one kernel over one plane, with everything that it reads and writes.

Invariant: what stands in a call has been looked at (`checks`); the kernel and its twin take the
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

Kernel: TypeAlias = Literal["paged_gather", "paged_scatter", "rerotate", "scatter_fused_recompute"]


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """What to do with one plane.

    Attributes:
        kernel: which.
        plane: the pool's side.
        covers: what one of its scales covers.
        slots: int64 `(n,)`.
        skipped: uint8 `(n,)`, becomes 1 where a token was passed over and 0 elsewhere.
        rows: `(n, heads, dim)`, read or written; empty for `rerotate`.
        turns: int64 `(n,)`, positions or deltas; empty where nothing turns.
        rope: what turns; None where nothing does.
        deviation: fp32 `(n,)`, written; None where nobody asked.
    """

    kernel: Kernel
    plane: Plane
    covers: Covers
    slots: torch.Tensor
    skipped: torch.Tensor
    rows: torch.Tensor
    turns: torch.Tensor
    rope: Rope | None = None
    deviation: torch.Tensor | None = None
