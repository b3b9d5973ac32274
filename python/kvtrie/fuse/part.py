"""Part: a distinct chunk of a request, or its prefix, while it is leased.

Invariant: the lease of a "hit" covers its whole sequence. Cost: plain values, filled in by `Fetch`.
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
        key: its name, 32 bytes.
        at: position of its first token, to which its K is rotated.
        sequence: the stored tokens, int64: the prefix, its tokens, and the filler up to the end of
            a block, computed like all tokens. Empty for a "given" part.
        state: "hit" if its KV is cached or loading, "absent" if it must be computed, "lost" if it
            must be computed after a failed load, "given" for KV from the caller.
        start: position in `sequence` of the first token to compute, the end for a hit.
        tiers: number of its cached tokens, without the prefix, by kind of tier.
        blocks: number of its cached blocks, by kind of tier.
        given: K `(n, kv_heads, head_dim)` and V per layer of a "given" part.
        lease: holds its blocks. None for a "given" part and while waiting for the prefix.
        loads: the unfinished loads of its lease, None if there are none.
        rows: int64 `(layers, blocks)`, the first tier's slots of its sequence.
        places: by first and last position plus 1, blocks and offsets in them, int64 `(n,)`: the
            same for all layers.
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
    places: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = field(
        default_factory=dict[tuple[int, int], "tuple[torch.Tensor, torch.Tensor]"]
    )

    @property
    def found(self) -> int:
        """Number of its cached tokens, without the prefix."""
        return sum(self.tiers.values())

    def see_origin(self, plan: Plan, manager: BlockManager) -> None:
        """Record the source tiers of its tokens and blocks, by the slowest tier of any layer.

        Args:
            plan: the plan of its lease.
            manager: the manager of the lease.
        """
        slowest = np.full(len(self.sequence), -1, dtype=np.int64)
        for span in plan.spans:
            if span.action != "recompute":
                part = slowest[span.start : span.stop]
                np.maximum(part, span.tier if span.action == "load" else 0, out=part)
        size = manager.block_tokens
        for each, tiers in (
            (self.tiers, slowest[self.at : self.at + len(self.tokens)]),
            (self.blocks, slowest[self.at // size * size :: size]),
        ):
            each.clear()
            for tier, settings in enumerate(manager.tiers):
                if count := int((tiers == tier).sum()):
                    each[settings.kind] = count
