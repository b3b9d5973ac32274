"""AttnWeightsReplayLog: the decisions of a cache, so that they can be played again.

Invariant: the steps' lengths, and from the first overwrite on the rows per batch row and head.
Cost: four bytes per token, batch row and KV head from then on.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

__all__ = ["AttnWeightsReplayLog"]


@dataclass(slots=True)
class AttnWeightsReplayLog:
    """Steps in their order.

    Attributes:
        steps: tokens of each.
        rows: per step int32 `(batch, kv_heads, m)`, the rows chosen; None while the cache fills.
    """

    steps: list[int] = field(default_factory=list[int])
    rows: list[torch.Tensor | None] = field(default_factory=list[torch.Tensor | None])

    def note(self, new: int, rows: torch.Tensor | None) -> None:
        """Note one step."""
        self.steps.append(new)
        self.rows.append(None if rows is None else rows.to(torch.int32))

    def chosen(self, step: int) -> torch.Tensor:
        """The rows of a step, int64.

        Raises:
            IndexError: the log has no such step.
        """
        rows = self.rows[step]
        if rows is None:
            raise IndexError(f"step {step} of the log filled empty rows")
        return rows.long()
