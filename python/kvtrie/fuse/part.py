"""Part: a distinct chunk of a request, or its prefix, while it is held.

Invariant: a part that is "hit" is leased whole. Cost: plain values, filled in by `Fetch`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from numpy.typing import NDArray

    from kvtrie import BlockManager, Lease, Plan
    from kvtrie.transfer.layer_loads import LayerLoads

__all__ = ["Part", "State"]

State: TypeAlias = Literal["hit", "absent", "lost", "given"]
"""State of a part; see `Part`."""


@dataclass(slots=True, eq=False)
class Part:
    """A distinct chunk of a request, or its prefix.

    Attributes:
        tokens: its own tokens, int64 `(n,)`.
        key: 32 bytes that name it.
        at: the position that K of its first token is rotated to.
        sequence: the stored tokens, int64: the prefix, its tokens, and the filler up to the end of
            a block, which is computed like the rest. Empty for one that was given.
        state: "hit" if its KV is there or on its way, "absent" if it must be computed, "lost" if it
            must be since its load failed, "given" if the caller brought it.
        start: position in `sequence` from which on it must be computed; its end for a hit.
        tiers: number of its tokens that were found, without the prefix, by the kind of the tier
            they come from.
        blocks: number of its blocks that were found, by the kind of the tier.
        given: K `(n, kv_heads, head_dim)` and V per layer of a part that is "given".
        lease: holds its blocks; None for one that is given, or waits for the prefix.
        loads: the loads of its lease that have not ended; None without any.
        rows: int64 `(layers, blocks)`, the first tier's units of its sequence.
    """

    tokens: NDArray[np.int64]
    key: bytes
    at: int
    sequence: NDArray[np.int64]
    state: State = "absent"
    start: int = 0
    tiers: dict[str, int] = field(default_factory=dict[str, int])
    blocks: dict[str, int] = field(default_factory=dict[str, int])
    given: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
    lease: Lease | None = None
    loads: LayerLoads | None = None
    rows: torch.Tensor | None = None

    @property
    def found(self) -> int:
        """Number of its tokens that were found, without the prefix."""
        return sum(self.tiers.values())

    def see_origin(self, plan: Plan, manager: BlockManager) -> None:
        """Note the tiers that its tokens and blocks come from: the slowest one of any layer counts.

        Args:
            plan: the plan of its lease.
            manager: the manager of the lease.
        """
        slowest = np.full(len(self.sequence), -1, dtype=np.int64)
        for span in plan.spans:
            if span.action != "recompute":
                here = slowest[span.start : span.stop]
                np.maximum(here, span.tier if span.action == "load" else 0, out=here)
        size = manager.block_tokens
        for each, tiers in (
            (self.tiers, slowest[self.at : self.at + len(self.tokens)]),
            (self.blocks, slowest[self.at // size * size :: size]),
        ):
            each.clear()
            for tier, settings in enumerate(manager.tiers):
                if count := int((tiers == tier).sum()):
                    each[settings.kind] = count
